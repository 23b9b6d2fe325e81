"""Native kernels watched by gcc's sanitizers: of threads, of addresses, and of what the standard leaves undefined.

The sanitizer of threads knows nothing of OpenMP's own waiting, and would report it. So kernels are linked with a team
of plain threads (`threads/team.c`) in the place of OpenMP's, which shares out the same parallel regions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from locant.kernels import native
from locant.kernels.native import build

CALLS = Path(__file__).parent / "threads"
ROOT = Path(__file__).parents[2]
ATOMIC = "__atomic_sub_fetch(&plan->left[number], 1, __ATOMIC_ACQ_REL)"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or not (shutil.which("gcc") and shutil.which("setarch")),
        reason="there is no gcc or setarch",
    ),
]


def sanitized(kind: str) -> list[str]:
    """As kernels are compiled, but for what would take minutes to: threads of a kernel not optimised seldom meet."""
    level = "-O1" if kind == "thread" else "-O0"
    return [*(flag for flag in build.FLAGS if flag != "-O3"), level, "-g", f"-fsanitize={kind}"]


def races(kernel: str, folder: Path, sources: Path = build.HERE) -> int:
    """How many are reported of one call of `kernel` by four threads."""
    command = ["gcc", *sanitized("thread"), "-DVARIANT=watched", f"-I{sources}", f"-I{build.HERE}"]
    made = []
    for source in (f"call_{kernel}.c", "team.c"):
        made.append(str(folder / f"{source}.o"))
        subprocess.run([*command, "-c", str(CALLS / source), "-o", made[-1]], check=True)
    program = str(folder / kernel)
    subprocess.run(["gcc", "-fsanitize=thread", *made, "-lm", "-lpthread", "-o", program], check=True)
    done = subprocess.run(["setarch", "-R", program], capture_output=True, text=True, check=False)
    found = done.stderr.count("WARNING: ThreadSanitizer: data race")
    assert done.returncode == (66 if found else 0), done.stderr  # 66 is the sanitizer's own
    return found


@pytest.mark.parametrize("kernel", sorted(source.stem for source in build.HERE.glob("*.c")))
def test_no_race_is_seen(kernel: str, tmp_path: Path) -> None:
    assert races(kernel, tmp_path) == 0


def test_a_race_would_be_seen(tmp_path: Path) -> None:
    """The twin: chunks that are done are counted without care for other threads."""
    code = (build.HERE / "decode.c").read_text(encoding="utf-8")
    assert ATOMIC in code
    (tmp_path / "decode.c").write_text(code.replace(ATOMIC, "--plan->left[number]"), encoding="utf-8")
    assert races("decode", tmp_path, sources=tmp_path) > 0


TESTS = [
    "tests/kernels/norm_rotary/test_cpu.py",
    "tests/kernels/rotary/test_cpu.py",
    "tests/kernels/test_distance_decoding.py",
    "tests/text/windows/test_native.py",
]
WATCHED = """
import sys
from pathlib import Path
import pytest
from locant.kernels import native
from locant.kernels.native import build
folder, flags, best, *options = sys.argv[1:]
build.HERE, build.FLAGS, build.VARIANTS = Path(folder), tuple(flags.split()), {best: ""}
native.variants = lambda: (best,)
assert native.status() == f"used, for {best}", native.status()
sys.exit(pytest.main(options))
"""


def libraries() -> list[str]:
    ask = [["gcc", f"-print-file-name={name}.so"] for name in ("libasan", "libubsan")]
    return [subprocess.run(one, capture_output=True, text=True, check=True).stdout.strip() for one in ask]


@pytest.mark.skipif(native.function("locant_rotate") is None, reason=f"native kernels are {native.status()}")
def test_the_tests_of_every_kernel_touch_no_foreign_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is asked of the instruction set that this machine would take, once more with both sanitizers."""
    preloaded = libraries()
    if not all(Path(library).is_absolute() for library in preloaded):
        pytest.skip("gcc has no sanitizers here")
    best = native.runnable()[0]
    machine = [build.VARIANTS[best]] if len(build.variants()) > 1 else []
    flags = [*sanitized("address,undefined"), "-fno-sanitize-recover=all", *machine]
    for source in build.HERE.glob("*.[ch]"):
        shutil.copy(source, tmp_path)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "FLAGS", tuple(flags))
    monkeypatch.setattr(build, "VARIANTS", {best: ""})
    monkeypatch.setattr(build, "variants", lambda: (best,))
    build.build()
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "-k", best, *TESTS]
    # What the compiler leaves behind is no concern here, and neither are leaks of Python and torch.
    surroundings = {"LD_PRELOAD": ":".join(preloaded), "ASAN_OPTIONS": "detect_leaks=0", "LOCANT_NATIVE": best}
    command = [sys.executable, "-c", WATCHED, str(tmp_path), " ".join(flags), best, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **surroundings}
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3_000:]
    assert " passed" in done.stdout
