"""Reading a compiled program: what runs, how often, what it moves and what hides it.

Pure functions of the text of `compiled.as_text()`; nothing here imports jax.

hlo.py
    read_program(text) -> Program                 .partitions .executions {computation: times} .unknown (Unknown, ...)
    Program / Computation / Instruction / Shape / Unknown(what, where)

flops.py
    count_flops(program) -> Flops                 .total (per device, one call), .by_source {"file:line": FLOPs},
                                                  .opaque ((custom call target, calls), ...) whose FLOPs are not in the text
    instruction_flops(program, computation, instruction) -> int

collectives.py
    Links(fast, network, peak)                    bytes/s a device inside and across domains, matmul FLOP/s
    read_collectives(program, domain, links) -> tuple[Collective, ...]
                                                  `domain`: int array [data, pipe, tensor, seq, expert] (Topology.domain)
    Collective(name, kind, computation, op_name, source, dtypes, elements, payload, wire, calls, groups, axes, exact,
               domains, link, asynchronous, flops_between, seconds, conditional, reduction)
        .covered share of `seconds` hidden [0, 1]; .crosses domains > 1; .axes_label "data+tensor" / "part of ..."
    gradient_reductions(collectives, batch_axes) -> Reductions(calls, bytes, found)
    prove_tight(collectives, domain) -> Proof(holds, guilty, mixed)
    coverage(collectives) -> {"fast": share, "network": share}    weighted by bytes on the wire
    unread_collectives(program, domain) -> tuple[Unknown, ...]     a start without a done, groups that do not fit the mesh

partitioner.py
    inventions(collectives) -> tuple[Collective, ...]              resharding that no line of the program asks for
    rematerializations(stderr) -> tuple[Rematerialization(op, op_name, source, before, after), ...]

buffers.py
    largest_buffers(program, count=10) -> Peak(bytes, place, buffers (Buffer(name, bytes, shape, op_name, source), ...))
"""
