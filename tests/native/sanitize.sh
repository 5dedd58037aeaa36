#!/bin/sh
# The native code under sanitizers: `sanitize.sh asan` (address and undefined behavior; the C++ tests, then the
# Python tests of the kernels on an instrumented library), `sanitize.sh tsan` (threads; the C++ tests), or both.
set -eu
top=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$top/.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

build() { # folder, sanitizers
  cmake -S "$top" -B "$1" -DCMAKE_BUILD_TYPE=Debug -DWHERRY_SANITIZE="$2" -DWHERRY_TESTS=ON >/dev/null
  cmake --build "$1" --parallel "${JOBS:-2}" >/dev/null
}

programs() { # folder
  for program in "$1"/*_test; do
    echo "== $(basename "$program")"
    "$program" "$scratch"
  done
}

asan() (
  build "$top/build/asan" address,undefined
  export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
  programs "$top/build/asan"
  # A copy of the project, as an editable install finds its own sources before those of PYTHONPATH.
  mkdir "$scratch/project"
  plant='from pathlib import Path; from tests.mutants.__main__ import ROOT, copy_project; import sys'
  copy=$(cd "$top" && "$python" -c "$plant; print(copy_project(ROOT, Path(sys.argv[1])))" "$scratch/project")
  cp "$top/build/asan/libwherry.so" "$scratch/project/src/wherry/native/libwherry.so"
  echo "== Python tests on the instrumented library"
  # Only the library is instrumented, so what the interpreter leaves allocated is not looked at.
  export LD_PRELOAD="$(${CXX:-g++} -print-file-name=libasan.so) $(${CXX:-g++} -print-file-name=libstdc++.so)"
  export ASAN_OPTIONS=detect_leaks=0
  cd "$scratch/project"
  "$copy" -c 'from wherry import native; native.available_isas(); print(open("/proc/self/maps").read())' \
    | grep -q "$scratch/project/src/wherry/native/libwherry.so" || { echo "another library was tested" >&2; exit 1; }
  "$copy" -m pytest -p no:cacheprovider tests/native/test_update.py tests/native/test_split.py \
    tests/native/test_passes.py tests/native/test_blocks.py tests/native/test_formulas.py
)

tsan() {
  build "$top/build/tsan" thread
  programs "$top/build/tsan"
}

case "${1:-all}" in
  asan) asan ;;
  tsan) tsan ;;
  all) asan; tsan ;;
  *) echo "usage: $0 [asan|tsan|all]" >&2; exit 2 ;;
esac
