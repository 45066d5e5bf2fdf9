"""XLA options of the config: checked by name and type, passed to the real compilation, harmless on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxtrain.config import ConfigError, load_config, replace, validate
from jaxtrain.train.options import check_options, option_names
from jaxtrain.train.resolve import bind
from jaxtrain.train.step import compile_step

TINY = validate(
    {
        "model": {"vocab_size": 64, "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 32, "max_seq_len": 16},
        "data": {"seq_len": 16, "tokenizer": {"vocab_size": 64}},
        "train": {"global_batch": 8},
    }
)


def test_the_list_of_names_is_what_the_compiler_accepts() -> None:
    names = option_names()
    assert len(names) > 200 and "xla_gpu_all_gather_combine_threshold_bytes" in names
    # Booleans are the commonest type: most of them can be set, and each is known by name.
    for name in [name for name in names if name.startswith("xla_gpu_enable_")][:20]:
        try:
            check_options({name: True})
        except ConfigError as error:
            assert "use a value of type" in str(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"xla_gpu_al_gather_combine_threshold_bytes": 1}, "did you mean xla_gpu_all_gather_combine_threshold_bytes?"),
        ({"gpu_enable_triton_gemm": False}, "did you mean xla_gpu_enable_triton_gemm?"),
        ({"xla_gpu_all_gather_combine_threshold_bytes": "much"}, "use a value of type int64"),
        ({"xla_gpu_enable_triton_gemm": "no"}, "use a value of type bool"),
        ({"optimization_level": "O7"}, "use O0, O1, O2, O3"),
    ],
)
def test_wrong_options_are_refused_before_they_are_used(
    options: dict[str, bool | int | float | str], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        bind(TINY.model_copy(update={"xla": options}))
    assert words in str(error.value)


def test_a_value_that_is_no_scalar() -> None:
    with pytest.raises(ConfigError, match=r"xla\.xla_foo is \['1'\]: use true, false, a number or text"):
        load_config("tiny", ["xla={xla_foo: [1]}"])


def test_options_reach_the_compiler_and_gpu_options_do_no_harm_here(tmp_path: Path) -> None:
    config = replace(
        TINY, "xla.xla_gpu_all_gather_combine_threshold_bytes=1000", "xla.optimization_level=O1",
        f"xla.xla_dump_to={tmp_path}", "xla.xla_dump_hlo_as_text=true",
    )  # fmt: skip
    setup = bind(config)
    compile_step(setup.step, setup.abstract, setup.abstract_batch)
    assert any("jit_train_step" in path.name for path in tmp_path.iterdir()), "the dump option had no effect"
