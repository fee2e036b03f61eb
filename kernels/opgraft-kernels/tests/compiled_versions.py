"""What the row-wise Triton kernels compile to, beside the versions that they declare.

Tables of a crossover hold for one version of a kernel. Here it is recorded what the kernels of a
version compile to, so that a test tells when a kernel was changed and its version was not:

    python compiled_versions.py             prints what they compile to
    python compiled_versions.py --record    records it in compiled_versions.json

What is compared is Triton's IR after its own simplification, without names and places, and how the
kernel is launched: a comment, a moved line or a renamed variable changes neither. Triton's versions
write different IR, so it is recorded for each of them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from compile_only import output_of, use_driver

RECORD = Path(__file__).with_suffix(".json")
MEND = f"python {Path(*RECORD.with_suffix('.py').parts[-4:])} --record"

#: What kernels compile to: a hash for each configuration.
Compiled: TypeAlias = Mapping[str, str]


class Found(NamedTuple):
    """An override's declared version, and what its kernels compile to here."""

    version: int
    compiled: Compiled


# ------------------------------------------------------------------ compiling


def compiled_from(*folders: Path) -> list[dict[str, Found]]:
    """What the kernels of each folder of sources compile to, by override, from a subprocess.

    Args:
        *folders: each with the package ``opgraft_kernels`` in it; none: as it is installed.
    """
    lines = output_of(sys.executable, __file__, *map(str, folders)).splitlines()
    return [{key: Found(*each) for key, each in json.loads(line).items()} for line in lines]


def _compile_from(folder: str) -> dict[str, Found]:
    """In a process of its own, for the package is imported once in a process."""
    if folder:
        sys.path.insert(0, folder)
    from opgraft_kernels.copies import overrides as copies
    from opgraft_kernels.cross_entropy import overrides as cross_entropy
    from opgraft_kernels.embedding import overrides as embedding
    from opgraft_kernels.nll_loss import overrides as nll_loss
    from opgraft_kernels.norms import overrides as norms
    from opgraft_kernels.softmax import overrides as softmax

    of_norms = {
        f"{norm.name}.{way}": Found(norm.op(way).version, _hashes(_launches(norm.name), way))
        for norm in (norms.RMS_NORM, norms.LAYER_NORM)
        for way in norms.DIRECTIONS
    }
    of_permuted = {
        f"{norm.name}.{way}_permuted": Found(
            norms.PERMUTED_VERSION, _hashes(_permuted_launches(norm.name), way)
        )
        for norm in (norms.RMS_NORM, norms.LAYER_NORM)
        for way in norms.DIRECTIONS
    }
    of_softmax = {
        f"{op.function}.{op.direction}": Found(
            op.version, _hashes(_softmax_launches(op.function == "log_softmax"), op.direction)
        )
        for op in softmax.OPS
    }
    hashes = _hashes(_cross_entropy_launches(), "both")
    of_cross_entropy = {"cross_entropy": Found(cross_entropy.VERSION, hashes)}
    of_nll_loss = {
        f"nll_loss.{way}": Found(nll_loss.VERSIONS[way], _hashes(_nll_loss_launches(), way))
        for way in nll_loss.DIRECTIONS
    }
    hashes = _hashes(_embedding_launches(), "backward")
    of_embedding = {"embedding.backward": Found(embedding.VERSION, hashes)}
    of_copies = {"copy": Found(copies.VERSION, _hashes(_copy_launches(), "copy"))}
    of_rows = {**of_norms, **of_permuted, **of_softmax}
    return {**of_rows, **of_cross_entropy, **of_nll_loss, **of_embedding, **of_copies}


def _hashes(launches: Iterable[tuple[str, dict[str, list[Any]]]], way: str) -> Compiled:
    return {
        name: _hash([_text(launch) for launch in by_way[way]])
        for name, by_way in launches
        if way in by_way
    }


def _softmax_launches(log: bool) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Rows that share a program, and strided lines; whole and read in blocks; shifted rows."""
    import torch

    from configurations import softmax_launches

    for dtype, shape in (
        (torch.bfloat16, (1024, 197)),
        (torch.bfloat16, (1024, 768)),
        (torch.bfloat16, (1024, 4096)),
        (torch.bfloat16, (1024, 50257)),
        (torch.float32, (1024, 128256)),
        (torch.bfloat16, (8, 64, 4096)),
        (torch.bfloat16, (8, 4096, 128)),
    ):
        forward, backward = softmax_launches(dtype, shape, log)
        name = f"{dtype} {' x '.join(map(str, shape))}".removeprefix("torch.")
        yield name, {"forward": [forward], "backward": [backward]}


def _cross_entropy_launches() -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Rows that share a program, that fit one, and that are read in blocks; shifted rows."""
    import torch

    from configurations import cross_entropy_launches

    for dtype, classes, smoothing in (
        (torch.bfloat16, 768, 0.0),
        (torch.bfloat16, 4096, 0.0),
        (torch.bfloat16, 128256, 0.0),
        (torch.bfloat16, 197, 0.0),
        (torch.bfloat16, 50257, 0.0),
        (torch.float32, 4096, 0.1),
        (torch.float32, 128256, 0.1),
    ):
        name = f"{dtype} {classes}, smoothing {smoothing}".removeprefix("torch.")
        yield name, {"both": cross_entropy_launches(dtype, 1024, classes, smoothing)}


def _nll_loss_launches() -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """One program of the sum, and more; rows of many classes, and of few."""
    import torch

    from configurations import nll_loss_launches

    for dtype, rows in ((torch.bfloat16, 1000), (torch.float32, 100_000)):
        *forward, backward = nll_loss_launches(dtype, rows, 1)
        name = f"{dtype} {rows}".removeprefix("torch.")
        yield name, {"forward": forward, "backward": [backward]}
    *_, backward = nll_loss_launches(torch.float32, 100_000, 1, classes=2)
    yield "float32 100000 of 2 classes", {"backward": [backward]}


def _embedding_launches() -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Rows that share a program, and that are split."""
    import torch

    from configurations import embedding_launches

    for dtype, width in ((torch.bfloat16, 1024), (torch.float32, 2048)):
        yield (
            f"{dtype} {width}".removeprefix("torch."),
            {"backward": embedding_launches(dtype, width)},
        )


def _permuted_launches(norm: str) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """A block that columns fill, and one that they do not."""
    import torch

    from configurations import permuted_launches

    for dtype, hidden in ((torch.bfloat16, 128), (torch.float32, 768)):
        forward, *backward = permuted_launches(dtype, hidden, has_mean=norm == "layer_norm")
        name = f"{dtype} {hidden}".removeprefix("torch.")
        yield name, {"forward": [forward], "backward": backward}


def _copy_launches() -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """To more bytes, to as many, and to fewer."""
    import torch

    from configurations import copy_launch

    for source, target in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16),
    ):
        name = f"{source} to {target}".replace("torch.", "")
        yield name, {"copy": [copy_launch(source, target)]}


def _launches(norm: str) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Every kernel once: of rows that fit a program, that are split, and that are longer still; of
    rows with a tail, and of pieces that leave registers for the weight, and that do not."""
    import torch

    from configurations import norm_launches

    for dtype, hidden in (
        (torch.bfloat16, 4096),
        (torch.float32, 8192),
        (torch.bfloat16, 65536),
        (torch.bfloat16, 1 << 22),
        (torch.bfloat16, 2560),
        (torch.bfloat16, 3584),
        (torch.bfloat16, 13824),
    ):
        forward, *backward = norm_launches(norm, dtype, hidden)
        name = f"{dtype} {hidden}".removeprefix("torch.")
        yield name, {"forward": [forward], "backward": backward}


def _hash(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _text(launch: Any) -> str:
    """A launch as text, without what says nothing about its speed."""
    options = {k: v for k, v in launch.keywords.items() if k not in launch.constexprs}
    return f"grid {launch.grid}, {sorted(options.items())}\n{_ir(launch)}"


def _ir(launch: Any) -> str:
    from triton.runtime.driver import driver

    kernel = launch.kernel
    device = driver.active.get_current_device()
    kernel.device_caches[device]  # makes what a call sets up first, the compiler among it
    kernel.compile = _simplified_ir
    ir = kernel.warmup(*launch.arguments, grid=(launch.grid,), **launch.keywords)
    return re.sub(r"(tt\.func public) @\w+", r"\1 @kernel", ir)


def _simplified_ir(source: Any, target: Any, options: Mapping[str, Any], **_: Any) -> str:
    """What `triton.compile` does first, with the code for the GPU left out."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend = make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = source.make_ir(target, parsed, functions, modules, context)
    return stages["ttir"](module, {}).str_nodebug()


# ------------------------------------------------------------------ comparing


def read() -> dict[str, Any]:
    """What was recorded: by override its version, and by Triton's version what it compiles to."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def problem(name: str, recorded: Mapping[str, Any], found: Found, triton_version: str) -> str:
    """What is wrong with an override's version; empty if nothing is.

    Args:
        name: of the override, such as ``"rms_norm.forward"``.
        recorded: what was recorded of it.
        found: what it is now.
        triton_version: the Triton that it was compiled with.
    """
    if recorded.get("version") != found.version:
        return f"{name} has version {found.version}, and that is not recorded: {MEND}"
    before = recorded["compiled"].get(triton_version, found.compiled)
    changed = sorted(
        key for key in {*before, *found.compiled} if before.get(key) != found.compiled.get(key)
    )
    if not changed:
        return ""
    return (
        f"{name} compiles to other code than its version {found.version} did "
        f"({', '.join(changed)}): raise version= in its overrides.py, so that tables that were "
        f"measured before count no more, and record anew: {MEND}"
    )


def updated(recorded: Mapping[str, Any], found: Found, triton_version: str) -> dict[str, Any]:
    """What to record of an override. What other Tritons compile a version to stays."""
    same = recorded.get("version") == found.version
    others = recorded["compiled"] if same else {}
    return {
        "version": found.version,
        "compiled": dict(sorted({**others, triton_version: found.compiled}.items())),
    }


def record() -> None:
    """Record what the kernels compile to now.

    It ends the process where a kernel was changed whose version was not.
    """
    import triton

    (found,) = compiled_from()
    recorded, version = read(), triton.__version__
    for name, each in found.items():
        before = recorded.get(name, {})
        if before.get("version") == each.version and (
            wrong := problem(name, before, each, version)
        ):
            sys.exit(wrong)
    content = {name: updated(recorded.get(name, {}), each, version) for name, each in found.items()}
    RECORD.write_text(json.dumps(content, indent=1) + "\n")


def main(*arguments: str) -> None:
    if arguments == ("--record",):
        record()
        return
    use_driver(90)
    import opgraft  # noqa: F401 (with torch and Triton: once, for all processes)

    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for found in pool.imap(_compile_from, arguments or ("",), chunksize=1):
            print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
