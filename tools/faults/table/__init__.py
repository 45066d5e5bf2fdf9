"""The faults by group: a function of each group returns its list."""

from faults.table import around, corpus, damage, jobs, kills, numbers, processes, storage

GROUPS = {
    "kill -9": kills.kills,
    "kill -9 in a save": kills.saves,
    "damaged checkpoints": damage.damages,
    "SIGSTOP": processes.stops,
    "signals": processes.signals,
    "failures of a process": processes.failures,
    "hangs": processes.hangs,
    "storage": storage.disks,
    "memory": storage.memory,
    "numbers": numbers.numbers,
    "other commands on the directory": around.companions,
    "files of the run": around.files,
    "corpus and tokens": corpus.corpora,
    "processes that disagree": jobs.disagreements,
    "clocks": jobs.clocks,
    "other meshes": jobs.meshes,
}
