"""Reading a compiled program: what runs, how often, what it moves and what overlaps with it.

Pure functions of the text of `compiled.as_text()`; the files listed here import no jax.

hlo.py
    read_program(text) -> Program                 .partitions .executions {computation: times} .unknown (Unknown, ...)
    Program / Computation / Instruction / ArrayShape / Unknown(what, where)

flops.py
    count_flops(program) -> ProgramFlops              .total (per device, one step), .by_source {"file:line": FLOPs},
                                                  .opaque ((custom call target, calls), ...): work not in the text
    instruction_flops(program, computation, instruction) -> int

collectives.py
    Links(fast, network, peak)                    bytes/s a device inside and across domains, matmul FLOP/s
    read_collectives(program, domain, links) -> tuple[Collective, ...]
                                                  `domain`: int [data, pipe, tensor, seq, expert], Topology.domain
    Collective(name, kind, computation, op_name, stack, dtypes, elements, payload, bytes_sent, calls, groups,
               axes, exact, domains, asynchronous, flops_between, seconds, hidden_seconds, conditional, reduction, spmd)
        .link "fast" / "network"; .crosses; .covered share of `seconds` hidden [0, 1]; .source "file:line";
        .axes_label "data+tensor" / "part of data+tensor" / "no axis"
    gradient_reductions(collectives, batch_axes) -> Reductions(calls, bytes, found)
    prove_tight(collectives, domain) -> DomainProof(holds, guilty ((Collective, groups), ...), mixed)
    coverage(collectives) -> {"fast": share, "network": share}    weighted by transfer time
    unread_collectives(program) -> tuple[Unknown, ...]            a start without a done

partitioner.py
    inserted_resharding(program, collectives) -> tuple[Collective, ...]    resharding that was not asked for
    read_rematerializations(stderr, program) -> tuple[Rematerialization(instruction, shape, op_name, source, before,
                                                                        after), ...]

buffers.py
    find_peak(report, assignment, program) -> PeakMemory(bytes, buffers), of *-live-range.txt and
                                                  *-buffer-assignment.txt of xla_dump_to
    Buffer(name, bytes, shape, op_name, stack, made_by)
"""
