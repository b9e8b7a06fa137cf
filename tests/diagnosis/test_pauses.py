"""An open section, or the names that frameworks gave their functions, tell what a rank does."""

from __future__ import annotations

import pytest

from holdfast.diagnosis.pauses import known_pause
from holdfast.messages.evidence import Frame

SITE = "/env/lib/python3.11/site-packages"


def stack(*names: str) -> tuple[Frame, ...]:
    """A stack of "file:function", innermost first."""
    pairs = [name.rpartition(":") for name in names]
    return tuple(Frame(file=f"{SITE}/{file}", line=1, function=fn) for file, _, fn in pairs)


@pytest.mark.parametrize(
    ("names", "pause"),
    [
        (["torch/serialization.py:_save", "torch/serialization.py:save"], "checkpoint"),
        (["torch/serialization.py:load"], "restore"),
        (["torch/distributed/checkpoint/state_dict_saver.py:save"], "checkpoint"),
        (["torch/distributed/checkpoint/state_dict_loader.py:load"], "restore"),
        (["torch/distributed/distributed_c10d.py:barrier"], "barrier"),
        (
            ["torch/nn/modules/module.py:_call_impl", "transformers/trainer.py:evaluate"],
            "evaluation",
        ),
        (["torch/serialization.py:save", "transformers/trainer.py:_save_checkpoint"], "checkpoint"),
        (["huggingface_hub/hf_api.py:upload_folder"], "upload"),
        (["accelerate/accelerator.py:save_state"], "checkpoint"),
        (["deepspeed/runtime/engine.py:save_checkpoint"], "checkpoint"),
        (["lightning/pytorch/loops/evaluation_loop.py:run"], "evaluation"),
        (["lightning/pytorch/trainer/trainer.py:save_checkpoint"], "checkpoint"),
        (["datasets/arrow_dataset.py:_map_single", "datasets/arrow_dataset.py:map"], "tokenising"),
        (["torch/_inductor/compile_fx.py:compile_fx"], "compile"),
        (["torch/nn/functional.py:linear"], ""),
        ([], ""),
    ],
)
def test_well_known_functions_name_the_pause(names: list[str], pause: str) -> None:
    assert known_pause(stack(*names)) == pause


def test_what_only_sounds_like_it_does_not() -> None:
    own = Frame(file="/home/me/train.py", line=1, function="evaluate")
    assert known_pause([own]) == ""
    native = Frame(file=f"{SITE}/torch/serialization.py", line=1, function="save", native=True)
    assert known_pause([native]) == ""
