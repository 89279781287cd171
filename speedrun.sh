#!/usr/bin/env bash
# From nothing to a chat: tokenizer, pretraining, mid-training, SFT, RL, evaluation, one question.
#
#     bash speedrun.sh                 # no data and no network needed; seven to fifteen minutes on two CPU cores
#
# Run it again and each stage that is finished is passed over; one that was interrupted goes on from its last checkpoint.
set -euo pipefail
cd "$(dirname "$0")"

# How many accelerators are there? One or none: python. Several: torchrun, one process each.
N=$(python -c "import common; found = common.find_devices(); print(next(iter(found.values())))")
if [ "$N" -gt 1 ]; then RUN="torchrun --standalone --nproc_per_node=$N"; else RUN="python"; fi
stage() { echo; echo "=== $1"; shift; echo "\$ $*"; "$@"; }

# Small on purpose: 4 layers of width 192, 4096 tokens of vocabulary, 256 of context. Every number is a knob: --help lists them.
stage "tokenizer"      python tokenizer.py --vocab_size=4096
stage "pretraining"    $RUN train_base.py --depth=4 --model_dim=192 --max_seq_len=256 --num_iterations=200 --eval_every=40
stage "mid-training"   $RUN train_mid.py --num_iterations=260 --eval_every=130
stage "fine-tuning"    $RUN train_sft.py --num_iterations=60
stage "reinforcement"  $RUN train_rl.py --num_iterations=45 --eval_every=10
stage "evaluation"     $RUN eval.py
stage "chat"             python chat.py -p "What is 17 + 25?"
echo
echo "Now talk to it yourself:  python chat.py    or on a page:  python chat.py --web=1"
