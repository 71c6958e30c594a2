#!/usr/bin/env bash
# Run a program on the hosts of a Slurm job: an agent of torchrun on each, which starts RANKS processes there.
#
#     RANKS=4 sbatch --nodes=2 examples/slurm.sh examples.qlora --mesh fsdp=8 --out runs/two
#
# It is submitted from the repository's root, in a folder that all hosts see, with .venv in it. Set GLOO_SOCKET_IFNAME to
# the network interface between the hosts if they have several.
#SBATCH --job-name=fquant
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.log
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # a restart gets a new store, without addresses of ranks that have gone
exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 .venv/bin/python -m torch.distributed.run \
    --nnodes="$SLURM_NNODES" --nproc-per-node="${RANKS:-1}" --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-endpoint="$first:29400" -m "$@"
