"""Names what a rank does by the names that torch and the frameworks gave their functions.

A rank that evaluates or saves a checkpoint may take minutes while the others wait for it. An open
section says so; where a script opens none, the function that it called does. The table is data: a
framework's name that is missing here is one more row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast.diagnosis.frames import main_thread
from holdfast.messages.evidence import Frame, RankEvidence

_ROWS: tuple[tuple[str, str, str], ...] = (
    # name of the pause, file, function
    ("upload", r"/huggingface_hub/", r"upload_\w+|push_to_hub|create_commit\w*|_upload\w*"),
    ("upload", r"/transformers/(trainer|modeling_utils|utils/hub)\.py$", r"_?push_to_hub\w*"),
    ("download", r"/huggingface_hub/", r"snapshot_download|hf_hub_download\w*|http_get"),
    ("checkpoint", r"/transformers/trainer\.py$", r"_save_checkpoint|save_model|_save"),
    ("checkpoint", r"/lightning(_fabric)?/|/pytorch_lightning/", r"save_checkpoint|_save\w*checkpoint"),
    ("checkpoint", r"/accelerate/", r"save_state|save_model|save_accelerator_state"),
    ("checkpoint", r"/deepspeed/runtime/", r"save_checkpoint|save_16bit_model|_save_\w*checkpoint"),
    ("checkpoint", r"/torch/distributed/checkpoint/", r"\w*save\w*|write_data|_write_\w+"),
    ("checkpoint", r"/torch/serialization\.py$", r"save"),
    ("restore", r"/torch/distributed/checkpoint/", r"\w*load\w*|read_data"),
    ("restore", r"/torch/serialization\.py$", r"load"),
    ("restore", r"/accelerate/", r"load_state|load_accelerator_state"),
    ("restore", r"/deepspeed/runtime/", r"load_checkpoint|_load_\w*checkpoint"),
    ("evaluation", r"/transformers/trainer\w*\.py$", r"_?evaluate|evaluation_loop|predict"),
    ("evaluation", r"/(lightning|pytorch_lightning)/.*loops/evaluation_loop\.py$", r"run"),
    ("compile", r"/torch/(_dynamo|_inductor|_functorch)/", r"\w*compile\w*|codegen\w*"),
    ("compile", r"/triton/", r"compile|_compile|make_\w+"),
    ("tokenising", r"/datasets/(arrow_dataset|dataset_dict)\.py$", r"_?map\w*|filter"),
    ("tokenising", r"/(transformers|tokenizers)/", r"_?(batch_)?encode\w*|tokenize\w*"),
    ("data preparation", r"/datasets/(builder|load)\.py$", r"load_dataset|download_and_prepare"),
    ("barrier", r"/torch/distributed/distributed_c10d\.py$", r"(monitored_)?barrier"),
)  # fmt: skip
_TABLE = tuple((name, re.compile(file), re.compile(f"({func})$")) for name, file, func in _ROWS)


def pause(evidence: RankEvidence) -> str:
    """Return the section that names what a rank does; empty if none does."""
    if evidence.sections:
        return evidence.sections[-1][:64]
    main = main_thread(evidence.stacks)
    return known_pause(main.frames) if main is not None else ""


def known_pause(frames: Sequence[Frame]) -> str:
    """Return what a stack is known to do, by the outermost function that says so: an evaluation
    loads and compiles, too."""
    python = [frame for frame in frames if not frame.native and frame.file]
    for frame in reversed(python):
        for name, file, function in _TABLE:
            if function.match(frame.function) and file.search(frame.file):
                return name
    return ""
