"""Builds the release wheel: for this Python, with one compiled core for each version of torch.

    python tools/build_wheel.py 2.11.0 2.13.0 2.15.0

A core is compiled against its torch's headers alone; the `version.py` beside them says which torch
that is. Both come from that torch's wheel, which `pip download` fetches (some hundred MB) unless an
earlier run has. Nothing else of the wheel is kept.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The sources of the distribution. They are copied, so that the wheel has nothing of earlier builds.
TREE = ("python", "csrc", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md")
LEAVE = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of torch, such as 2.13.0")
    parser.add_argument("--headers", type=Path, default=ROOT / "build" / "torch-headers")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    folders = [headers(version, options.headers.resolve()) for version in options.versions]
    print(build(folders, options.out.resolve()))


def headers(version: str, cache: Path) -> Path:
    """The folder of a torch's headers, fetched where the cache does not have it."""
    kept = cache / version
    include = kept / "torch" / "include"
    if not (include.parent / "version.py").is_file():
        print(f"== fetching torch {version} for its headers", flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as place:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*pip, "--dest", place, f"torch=={version}"], check=True)
            (wheel,) = Path(place).glob("torch-*.whl")
            unpacked = Path(place) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                wanted = ("torch/include/", "torch/version.py")
                archive.extractall(
                    unpacked, [n for n in archive.namelist() if n.startswith(wanted)]
                )
            shutil.rmtree(kept, ignore_errors=True)  # of an earlier run, which kept less
            unpacked.rename(kept)
    return include


def build(folders: list[Path], out: Path) -> Path:
    """The wheel with a core for each folder of headers."""
    with tempfile.TemporaryDirectory() as place:
        tree, made = Path(place) / "opgraft", Path(place) / "wheel"
        tree.mkdir()
        for name in TREE:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=LEAVE)
            else:
                shutil.copy2(ROOT / name, tree)
        settings = {
            "OPGRAFT_BUILD_CORE": "1",
            "OPGRAFT_TORCH_HEADERS": os.pathsep.join(map(str, folders)),
        }
        subprocess.run(
            [sys.executable, "-c", BUILD, str(made)],
            cwd=tree,
            env=os.environ | settings,
            check=True,
        )
        (wheel,) = made.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(wheel, out))


if __name__ == "__main__":
    main()
