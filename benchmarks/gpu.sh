#!/usr/bin/env bash
# Train the `base` preset on Multi30k on one GPU, and say how fast and how good: one table.
#
#     MULTI30K_DIR=folder benchmarks/gpu.sh            at most 8 minutes
#     benchmarks/gpu.sh --small                        seconds, on anything, to see it work
#
# It needs torch, tokenizers, safetensors and sacrebleu, and neither a network nor an
# installed package. PYTHON names another interpreter than python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec timeout 470 "${PYTHON:-python3}" -u benchmarks/gpu.py "$@"
