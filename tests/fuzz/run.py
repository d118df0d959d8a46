"""Coverage-guided fuzzing of one decoder: `python tests/fuzz/run.py TARGET [libFuzzer's arguments]`.

atheris comes with kvbus[dev] on Linux x86-64. What is found goes to a file `crash-...`; put it into
tests/fuzz/corpus/TARGET/, which `tests/test_fuzz.py` replays for ever. libFuzzer writes what widens its coverage into
the first directory that it is given, so give it one of your own before ours.

    mkdir /tmp/found; python tests/fuzz/run.py message -max_total_time=60 /tmp/found tests/fuzz/corpus/message
"""

import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "services"), str(ROOT / "schemas")]

with atheris.instrument_imports(include=["kvbus", "kvbus_schemas", "tests.fuzz"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"usage: run.py TARGET [libFuzzer's arguments]; targets: {', '.join(TARGETS)}")
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
