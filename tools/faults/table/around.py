"""Other commands on a run directory, and files of it that are not what was written."""

from __future__ import annotations

from faults import actions as a
from faults.fault import Fault
from faults.table.status import REFUSED, STORAGE


def companions() -> list[Fault]:
    """Other commands on the same directory."""
    slow = {"pause": 0.7}
    often = ("checkpoint.every=1",)

    def reader(*words: str) -> Fault:
        return Fault(
            f"{words[0]} beside a run that saves at every step",
            "during the saves",
            plant=slow,
            overrides=often,
            when=a.step(2),
            do=a.beside(*words),
        )

    return [
        Fault(
            "two runs on one directory",
            "a second `train` after step 3",
            plant=slow,
            when=a.step(3),
            do=a.beside("train", "{config}", "--run", "{run}", statuses=(REFUSED,)),
        ),
        Fault(
            "two supervisors on one directory",
            "a second `launch` after step 3",
            plant={"pause": 2.0},
            processes=2,
            when=a.step(3),
            limit=240,
            do=a.beside(
                "launch",
                "{config}",
                "--run",
                "{run}",
                "--processes",
                "2",
                "--devices-per-process",
                "1",
                statuses=(REFUSED,),
            ),
        ),
        Fault(
            "a lease of a dead process of another host",
            "lease.json of a host that gives no heartbeat",
            begin="interrupted",
            before=a.foreign_lease,
            says="taken over",
        ),
        Fault(
            "an unreadable lease",
            "lease.json holds zeros",
            begin="interrupted",
            before=a.write("lease.json", b"\0" * 100),
            limit=180,
        ),
        reader("eval", "{run}"),
        reader("generate", "{run}", "--prompt", "def", "--tokens", "4"),
        reader("export-hf", "{run}", "{new}"),
        reader("inspect", "{run}"),
    ]


def files() -> list[Fault]:
    """Files of a run directory that are not what was written."""

    def broken(name: str, how: str, before: object, **more: object) -> Fault:
        return Fault(name, how, begin="interrupted", before=before, **more)  # type: ignore[arg-type]

    return [
        broken(
            "metrics.jsonl with a torn line", "the last line is cut", a.append("metrics.jsonl", b'{"step": 11, "lo')
        ),
        broken(
            "metrics.jsonl with zeros at its end", "as after a power failure", a.append("metrics.jsonl", b"\0" * 300)
        ),
        broken(
            "metrics.jsonl with a flipped bit",
            "one bit in the middle",
            a.flip("metrics.jsonl"),
            equal=False,
            status=(0, REFUSED),
            after=a.drop_bad_rows,
            older=True,
        ),
        broken("metrics.jsonl is missing", "removed", a.remove("metrics.jsonl"), equal=False),
        broken(
            "config.yaml is truncated",
            "half of it",
            a.both(a.keep_config, a.truncate("config.yaml")),
            status=(0, REFUSED),
            after=a.put_back,
        ),
        broken(
            "config.yaml is empty",
            "0 bytes",
            a.both(a.keep_config, a.truncate("config.yaml", 0)),
            status=(0, REFUSED),
            after=a.put_back,
        ),
        broken(
            "config.yaml is missing",
            "removed",
            a.both(a.keep_config, a.remove("config.yaml")),
            status=(0, REFUSED),
            after=a.put_back,
        ),
        broken(
            "environment.json and sharding.json are garbage",
            "both overwritten",
            a.both(a.write("environment.json", b"{"), a.write("sharding.json", b"\xff\xfe")),
        ),
        broken(
            "summary.json is truncated", "half an object beside an unfinished run", a.write("summary.json", b'{"loss')
        ),
        broken("events.jsonl with a torn line", "the last line is cut", a.append("events.jsonl", b'{"time": 17, "ki')),
        broken("events.jsonl is garbage", "binary", a.write("events.jsonl", b"\xff\x00{}\n[1]\nnull\n")),
        broken(
            "a folder in place of metrics.jsonl",
            "mkdir",
            a.both(a.remove("metrics.jsonl"), lambda scene: (scene.run / "metrics.jsonl").mkdir()),
            equal=False,
            status=(STORAGE, REFUSED),
            rerun=False,
        ),
    ]
