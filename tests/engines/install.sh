#!/usr/bin/env bash
# Installs what the Slurm test bed needs, by apt: slurm-wlm and munge (14 MB). Debian or Ubuntu, root.
# Their services are not used: each test cluster starts its own daemons.
set -euo pipefail

if command -v slurmctld slurmd munged srun >/dev/null; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "Slurm is not installed, and installing it needs root: sudo $0" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null; then
    echo "Slurm is not installed, and there is no apt-get: install slurmctld, slurmd and munge" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install -y -qq --no-install-recommends slurm-wlm munge)
"${install[@]}" || { apt-get update -qq && "${install[@]}"; }
