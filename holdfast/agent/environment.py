"""The environment of a rank: torchrun's, variable by variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from holdfast.config.settings import RunSettings
from holdfast.messages.records import Part


def node_environment(settings: RunSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """What all processes of the node have in common."""
    env = dict(environ)
    if settings.nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(settings.signals_to_handle)
    return env


def rank_environment(
    settings: RunSettings,
    part: Part,
    local_rank: int,
    run_id: str,
    error_file: Path,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """What makes one rank differ from the others."""
    rank = str(part.first_rank + local_rank)
    env = {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(part.group_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": settings.role,
        "LOCAL_WORLD_SIZE": str(part.slots),
        "WORLD_SIZE": str(part.world_size),
        "GROUP_WORLD_SIZE": str(part.group_world_size),
        "ROLE_WORLD_SIZE": str(part.world_size),
        "MASTER_ADDR": part.store_address,
        "MASTER_PORT": str(part.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(part.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(part.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # Rank 0's worker hosts the store of its own round; the agent never imports torch.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }
    if settings.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        devices = environ.get("CUDA_VISIBLE_DEVICES", "")
        visible = [word for word in devices.split(",") if word]
        env["CUDA_VISIBLE_DEVICES"] = visible[local_rank] if visible else str(local_rank)
    return env
