"""`opgraft doctor`: does everything that is installed work, and if not, why and what to do."""

from __future__ import annotations

import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from opgraft import dsl as dsls
from opgraft import packs, spelling
from opgraft.base import env
from opgraft.cache import bundles, entries
from opgraft.cache.entries import Place
from opgraft.cli import cudnn, facts, output
from opgraft.control import overrides
from opgraft.core import store
from opgraft.explanation import Neighbours, neighbours
from opgraft.explanation.neighbourhood import FLASH_ATTENTION
from opgraft.ready import claims, plan_keys, pool
from opgraft.ready.readiness import summary
from opgraft.registry import Override, registry

Level = Literal["ok", "note", "problem"]

_MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
#: Environment variables that change what opgraft and the DSLs do.
_VARIABLES = ("OPGRAFT_", "TRITON_", "CUTE_DSL_", "TORCH_DEVICE_BACKEND_AUTOLOAD", "CUDA_VISIBLE")


class Check(NamedTuple):
    """The result of one check.

    Attributes:
        topic: what was checked.
        level: `"ok"`; `"note"`: intended, or nothing to be done; `"problem"`: something that is
            installed does not work.
        text: what was found.
        mend: what to do about it.
    """

    topic: str
    level: Level
    text: str
    mend: str = ""


def command(as_json: bool) -> int:
    """Print what was checked; 1 if something that is installed does not work."""
    checks = list(examine())
    healthy = all(check.level != "problem" for check in checks)
    if as_json:
        found = [check._asdict() for check in checks]
        output.print_json({"healthy": healthy, "versions": facts.versions(), "checks": found})
    else:
        rows = [[c.topic, _MARKS[c.level], c.text, c.mend] for c in checks]
        console = output.console()
        headings = ["checked", "state", "found", "what to do"]
        output.print_table("opgraft doctor", headings, rows, prose=["found", "what to do"])
        count = sum(check.level == "problem" for check in checks)
        console.print("Everything that is installed works." if healthy else f"{count} problem(s).")
    return 0 if healthy else 1


def examine() -> Iterator[Check]:
    """All checks of `opgraft doctor`, in the order in which it prints them."""
    yield from _torch()
    yield from _compiled_core()
    yield from _gpus()
    yield from _cudnn()
    yield from _activation()
    yield from _packs()
    yield from _overrides()
    yield from _readiness()
    yield from _bundles()
    yield from _tables()
    yield from _dsls()
    yield from _host_compiler()
    yield from _neighbours()
    yield from _caches()
    yield from _environment()


def _torch() -> Iterator[Check]:
    found = facts.versions()
    text = f"torch {torch.__version__}, opgraft {found['opgraft']}, Python {sys.version.split()[0]}"
    text += f" on {platform.system()} {platform.machine()}"
    old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)
    if old:
        yield Check("torch", "problem", text, "opgraft needs torch 2.11 or newer")
    else:
        yield Check("torch", "ok", text)


def _compiled_core() -> Iterator[Check]:
    core = facts.core()
    if env.wants_python_router():
        yield Check("core", "note", "calls are routed in Python: OPGRAFT_ROUTER=python")
    elif core["built"]:
        yield Check("core", "ok", f"compiled for torch {core['torch']}: {core['file']}")
    else:
        text = f"none, so that packs are not activated: {core['reason']}"
        yield Check("core", "problem", text, "opgraft build")


def _gpus() -> Iterator[Check]:
    if torch.version.hip:
        yield Check("GPU", "note", f"ROCm {torch.version.hip}: CUDA capabilities do not apply")
    elif torch.version.cuda is None:
        yield Check("GPU", "note", "none for this torch: it is a build without CUDA")
    elif not torch.cuda.is_available():
        text = f"none that torch, built for CUDA {torch.version.cuda}, can use: {_why_no_cuda()}"
        yield Check("GPU", "note", text)
    else:
        names = [
            f"{torch.cuda.get_device_name(index)} (compute capability {major}.{minor})"
            for index, (major, minor) in enumerate(facts.capabilities())
        ]
        text = f"{', '.join(names)}; torch is built for CUDA {torch.version.cuda}"
        yield Check("GPU", "ok", text)


def _why_no_cuda() -> str:
    try:
        torch.cuda.init()
    except Exception as error:
        return str(error).splitlines()[0]
    return "no device is visible"


def _cudnn() -> Iterator[Check]:
    """Whether torch runs its own cuDNN, on which it depends which attention runs."""
    found = cudnn.libraries()
    if found is None:
        return
    places = " and ".join(map(str, found.loaded)) or "an unknown folder"
    text = f"cuDNN {cudnn.spelled(found.version)} from {places}"
    others = [*_second_cudnns(found)]
    if not (others or found.strays or found.is_other_version):
        yield Check("cuDNN", "ok", f"{text}, torch's own")
        return
    text += f", where torch's own is {cudnn.spelled(found.own)}"
    text += f" from {found.own_folder}" if found.own_folder is not None else ""
    text = "; ".join([text, *others, _meaning_for_attention(found)])
    yield Check("cuDNN", _level_of_cudnn(found), text, _mend_of_cudnn(found))


def _second_cudnns(found: cudnn.Libraries) -> Iterator[str]:
    if found.searched:
        yield f"LD_LIBRARY_PATH has one in {', '.join(map(str, found.searched))}"
    if len(found.wheels) > 1:
        folders = [each.folder for each in found.wheels]
        text = f"installed are {' and '.join(map(str, found.wheels))}"
        if len(set(folders)) < len(folders):
            text += ", each of which overwrites the other's files"
        yield text


def _meaning_for_attention(found: cudnn.Libraries) -> str:
    if found.loses_attention:
        limit = cudnn.spelled(cudnn.NEWEST_WITHOUT_ATTENTION)
        text = "scaled_dot_product_attention runs FlashAttention-2 on Hopper and Blackwell, "
        return text + f"in place of cuDNN, which torch prefers if newer than {limit}"
    if found.is_refused:
        return "torch.backends.cudnn refuses it"
    if found.strays or found.is_other_version:
        return "attention runs with another cuDNN than torch was tested with"
    return "attention is not affected here, but would be if the other one were loaded first"


def _level_of_cudnn(found: cudnn.Libraries) -> Level:
    if not torch.cuda.is_available():
        return "note"
    is_preferred = any(capability[0] in (9, 10) for capability in facts.capabilities())
    fails = found.is_refused or len(found.loaded) > 1
    return "problem" if fails or (found.loses_attention and is_preferred) else "note"


def _mend_of_cudnn(found: cudnn.Libraries) -> str:
    mends = []
    if found.searched:
        mends.append(f"take {', '.join(map(str, found.searched))} out of LD_LIBRARY_PATH")
    own, *others = found.wheels or (None,)
    if others:
        mends.append(f"pip uninstall {' '.join(each.name for each in others)}")
    is_torchs = own is not None and own.folder is not None and own.folder == found.own_folder
    if own is not None and is_torchs and (others or own.version != found.own):
        wanted = f"{own.name}=={cudnn.spelled(found.own)}"
        mends.append(f"pip install --force-reinstall --no-deps {wanted}")
    return ", ".join(mends) or "import torch before whatever else loads a cuDNN"


# ------------------------------------------------------------------ packs and overrides


def _activation() -> Iterator[Check]:
    """Whether `import torch` activates packs."""
    entries = metadata.entry_points(group="torch.backends")
    if env.installs_nothing():
        yield Check("activation", "note", "nothing is installed at all: OPGRAFT_DISABLE=1")
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        text = "import torch activates no pack: TORCH_DEVICE_BACKEND_AUTOLOAD switches it off"
        yield Check("activation", "note", text)
    elif not any(entry.value.startswith("opgraft.") for entry in entries):
        text = "import torch activates no pack: opgraft has no metadata, as in a bare source tree"
        yield Check("activation", "problem", text, "install it with pip")
    elif (wanted := env.packs()) is not None:
        names = ", ".join(sorted(wanted)) or "none"
        yield Check("activation", "note", f"import torch activates by OPGRAFT_PACKS: {names}")
    else:
        yield Check("activation", "ok", "import torch activates every pack that is installed")
    unknown = sorted(set(env.packs() or ()) - set(packs.installed()))
    if unknown:
        text = f"OPGRAFT_PACKS names what is not installed: {', '.join(unknown)}"
        yield Check("activation", "problem", text, "opgraft list shows the packs' names")


def _packs() -> Iterator[Check]:
    statuses = packs.statuses()
    if not statuses:
        yield Check("packs", "note", "none is installed", "pip install opgraft-kernels")
    for status in statuses:
        pack, about = status.pack, f"{status.pack.name} {status.pack.version}"
        if status.state == "active":
            count = len(overrides(pack=pack.name))
            yield Check("packs", "ok", f"{about}: active, {count} overrides")
            mend = f"report it to {pack.distribution}'s authors"
            for text in packs.misdeclared(pack):
                yield Check("packs", "problem", f"{about}: it {text}", mend)
            if names := packs.unregistered(pack):
                text = f"{about}: it declares, and does not override here: {', '.join(names)}"
                yield Check("packs", "note", text)
        elif status.state == "inactive":
            yield Check("packs", "note", f"{about}: not active: {status.reason}")
        elif status.state == "unmet":
            mend = f"install what it needs, or another version of {pack.distribution}"
            yield Check("packs", "problem", f"{about}: left out: {status.reason}", mend)
        else:
            mend = f"report it to {pack.distribution}'s authors, or pip uninstall it"
            yield Check("packs", "problem", f"{about}: failed: {status.reason}", mend)


def _overrides() -> Iterator[Check]:
    """Overrides that cannot run here, grouped by reason, and those that failed in this process."""
    missing, off, away = defaultdict(list), defaultdict(list), defaultdict(list)
    for override in overrides():
        if (failure := _failure(override)) is not None:
            mend = "report it to its authors; opgraft verify finds what else is wrong with it"
            yield Check("overrides", "problem", f"{_names([override])}: {failure}", mend)
        elif override.unavailable is not None:
            missing[override.unavailable].append(override)
        elif (reason := override.why_off()) is not None:
            off[reason].append(override)
        elif (reason := facts.why_unreachable(override)) is not None:
            away[reason].append(override)
    for reason, affected in missing.items():
        # The reason is such as "triton is missing (no module triton): pip install ...".
        found, colon, mend = reason.rpartition(": ")
        text = f"{_names(affected)}: {found if colon else reason}"
        yield Check("overrides", _level_of_missing(affected), text, mend if colon else "")
    for reason, affected in (*off.items(), *away.items()):
        yield Check("overrides", "note", f"{_names(affected)}: {reason}")
    reachable = [o for o in overrides() if o.enabled and facts.why_unreachable(o) is None]
    if reachable:
        yield Check("overrides", "ok", f"calls can reach {_names(reachable)}")


def _level_of_missing(affected: Iterable[Override]) -> Level:
    """How bad a missing DSL is: for a pack it is an optional extra, but a user's own needs it."""
    extras = (
        each.pack and (dsl := dsls.find(each.dsl or "")) and dsl.missing() for each in affected
    )
    return "note" if all(extras) else "problem"


def _failure(override: Override) -> str | None:
    """What went wrong with an override since it was registered; None if nothing did."""
    if override.state.given_up is not None:
        return f"given up: {override.state.given_up}"
    if override.state.quarantined:
        kinds, last = len(override.state.quarantined), list(override.state.quarantined.values())[-1]
        return f"kept from {kinds} kinds of calls; the last failed with {last}"
    if override.mismatches:
        return f"{override.mismatches} of {override.shadowed} hits differ from native's result"
    return None


def _names(affected: Iterable[Override]) -> str:
    return ", ".join(f"{override.name} ({override.op})" for override in affected)


def _readiness() -> Iterator[Check]:
    """What calls do whose kernels are not compiled, and who can compile them."""
    for override in overrides():
        states = facts.readiness_states(override)
        for reason in {state.reason: None for state in states if state.status == "failed"}:
            text = f"{_names([override])}: native serves calls, their kernels could not be compiled"
            yield Check("kernels", "problem", f"{text}: {reason}", "opgraft explain shows each")
        if any(state.is_pending for state in states):
            text = f"{_names([override])}: {summary(states)}"
            yield Check("kernels", "note", text)
    native = [each for each in overrides() if facts.when_not_ready(each) == "native"]
    forced = env.when_not_ready()
    if forced is not None:
        text = f"OPGRAFT_WHEN_NOT_READY={forced}: calls whose kernels are not compiled "
        text += "wait" if forced == "wait" else "are native's where the override has launch plans"
        yield Check("kernels", "note", text)
    elif native:
        text = f"until its kernels are compiled, native serves a call of {_names(native)}"
        yield Check("kernels", "ok", text)
    if not native:
        return
    if reason := pool.why_no_worker():
        yield Check("workers", "problem", f"{reason}: the program's own process compiles instead")
    elif reason := claims.why_unusable():
        text = f"{reason}: processes that need the same kernel each compile it"
        yield Check("workers", "note", text, "let OPGRAFT_CACHE name a folder that you can write")
    else:
        text = f"at most {pool.most_workers()} compile at a time; their claims: {claims.folder()}"
        yield Check("workers", "ok", text)
    if dsls.CUTEDSL.available() and (reason := entries.why_unusable()):
        text = f"{reason}: what CuteDSL compiles is not kept, and each process compiles it"
        yield Check("kernels", "note", text, "let OPGRAFT_CACHE name a folder of your own")


def _bundles() -> Iterator[Check]:
    """Whether the bundle that the environment names, and those of packs, can be used here."""
    if env.needs_bundle():
        text = "OPGRAFT_READY=bundle: what no bundle holds is native's"
        yield Check("bundle", "note", text)
    mend = "opgraft warmup SCRIPT --bundle DIR makes one; OPGRAFT_KERNELS=DIR names it"
    found = [*_bundle(bundles.in_use, "problem", mend)]
    for pack in _active_packs():
        find = partial(bundles.of_module, pack.entry.module)
        found += _bundle(find, "note", f"install {pack.distribution} anew")
    yield from dict.fromkeys(found)  # packs of one package share its bundle
    if not found and env.needs_bundle():
        yield Check("bundle", "problem", "OPGRAFT_KERNELS names none, and no pack has one", mend)


def _active_packs() -> list[packs.Pack]:
    return [status.pack for status in packs.statuses() if status.state == "active"]


def _bundle(find: Callable[[], Place | None], of_others: Level, mend: str) -> Iterator[Check]:
    """Whether a bundle can be used here, if there is one.

    Args:
        find: finds it.
        of_others: what it is if it was made for another GPU, or with other versions.
        mend: what to do about one that is damaged.
    """
    try:
        place = find()
        if place is None:
            return
        about, wrong = bundles.about(place.folder), bundles.problems(place.folder)
    except bundles.BundleError as error:
        yield Check("bundle", "problem", str(error), mend)
        return
    for text in wrong:
        yield Check("bundle", "problem", f"{place.folder}: {text}", mend)
    for text in _misfits(about):
        yield Check("bundle", of_others, f"{place.folder}: {text}", "make it anew, here")
    if not wrong:
        made = f"made on {about.get('made')} for {', '.join(about.get('devices', ())) or 'CPUs'}"
        plans = "1 launch plan" if place.count() == 1 else f"{place.count()} launch plans"
        yield Check("bundle", "ok", f"{place.folder}: {plans}, {made}")


def _misfits(about: dict[str, Any]) -> Iterator[str]:
    """Why what is in a bundle is not used here."""
    versions = plan_keys.versions()
    for name, version in about.get("versions", {}).items():
        if versions.get(name) != version:
            here = versions.get(name) or "missing"
            yield f"it was made with {name} {version}, which is {here} here"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if devices and not set(devices) & set(about.get("devices", ())):
        made_for = ", ".join(about.get("devices", ())) or "CPUs"
        yield f"it was made for {made_for}, and this is {devices[0]}"


def _tables() -> Iterator[Check]:
    """Which crossover tables decide, how old they are, and which were refused."""
    every = overrides()
    refused = {line for each in every if (it := each.decisions) for line in it.found.refused}
    for line in sorted(refused):
        yield Check("tables", "problem", line, "opgraft tune measures it anew, or delete it")
    by_text: dict[str, list[Override]] = defaultdict(list)
    outdated: dict[str, list[Override]] = defaultdict(list)
    for override in every:
        for row in facts.table_rows(override):
            by_text[facts.table_text(row)].append(override)
            if row["file"] is not None and (text := _other_versions(row, override)):
                outdated[f"{row['file']} holds, though it was measured with {text}"].append(
                    override
                )
    for text, affected in by_text.items():
        found = f"{_names(affected)}: {text}"
        if text.startswith("none for"):
            yield Check("tables", "note", f"{found}; they decline every call", "opgraft tune")
        else:
            yield Check("tables", "ok", found)
    for text in outdated:
        yield Check("tables", "note", text, "opgraft tune, if it matters")


def _other_versions(row: dict[str, Any], override: Override) -> str:
    """Versions that a table was measured with and that are others here; empty without any."""
    here = facts.versions()
    names = ["torch", *([override.dsl] if override.dsl in here else [])]
    measured = ((name, row["measured"].get(name)) for name in names)
    differing = [
        f"{name} {version} (here {here[name]})"
        for name, version in measured
        if version is not None and version != here[name]
    ]
    return " and ".join(differing)


# ------------------------------------------------------------------ DSLs

# They run in their own processes: a broken DSL may crash the process.
_TRIALS = {
    "triton": """
import triton
try:
    cache = triton.knobs.cache.dir
except AttributeError:
    cache = None
print(json.dumps({"cache": cache}))
""",
    "cutedsl": """
import cutlass, cutlass.cute, tvm_ffi
print(json.dumps({}))
""",
}


def _dsls() -> Iterator[Check]:
    for dsl in dsls.KNOWN:
        needed = any(override.dsl == dsl.name for override in overrides())
        if dsl.available():
            problem = _trial(dsl.name)[1]
            text = f"{dsl.name} {dsl.version() or 'of an unknown version'}"
            if problem:
                level: Level = "problem" if needed else "note"
                yield Check("DSL", level, f"{text} cannot be imported: {problem}", dsl.install)
            else:
                yield Check("DSL", "ok", f"{text} can be imported")
        elif not needed:  # else it is told with the overrides that miss it
            yield Check("DSL", "note", f"{dsl.name} is not installed; no override needs it")


@cache
def _trial(dsl: str) -> tuple[dict[str, Any], str]:
    """What a DSL reports about itself, and why it cannot be imported (empty if it can)."""
    command = [sys.executable, "-c", "import json\n" + _TRIALS[dsl]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return {}, "importing it takes more than two minutes"
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        return {}, last[0]
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said, ""


def _host_compiler() -> Iterator[Check]:
    """The C compiler with which Triton compiles a launcher for each kernel signature."""
    if not dsls.TRITON.available():
        return
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    places = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    headers = any((Path(place) / "Python.h").is_file() for place in places)
    if compiler is None or shutil.which(compiler) is None:
        text, mend = "no C compiler, which Triton needs for each launch", "install gcc, or set CC"
    elif not headers:
        text = f"no Python.h in {' or '.join(sorted(places))}, which Triton needs for each launch"
        mend = "install Python's headers (python3-dev)"
    else:
        yield Check("compiler", "ok", f"{compiler} and Python.h, for what launches Triton kernels")
        return
    needed = torch.cuda.is_available() and any(o.dsl == "triton" for o in overrides())
    text += "; its overrides fall back to the native kernels" if needed else ""
    yield Check("compiler", "problem" if needed else "note", text, mend)


# ------------------------------------------------------------------ other kernels at the same ops


def _neighbours() -> Iterator[Check]:
    """Third-party kernels at an op and key that has overrides."""
    alone = True
    chains = {(chain.op.name, chain.dispatch_key): chain for chain in registry.chains()}
    for each in neighbours():
        # The name is not resolved: that fails for an op whose library is gone.
        chain = chains.get((each.op, each.dispatch_key))
        if chain is None or not chain.members:
            continue
        for note in each.notes():
            alone = False
            level, mend = _level_of_note(each, note)
            yield Check("neighbours", level, f"{each.op} at {each.dispatch_key}: {note}", mend)
    if alone and overrides():
        yield Check("neighbours", "ok", "no kernel but PyTorch's where the overrides are")


def _level_of_note(neighbours: Neighbours, note: str) -> tuple[Level, str]:
    """Whether a note on neighbours is a problem, and what to do about it."""
    owners = {kernel.owner for kernel in neighbours.above}
    if not note.startswith("shadowed"):
        return "note", "start a process that never registers it" if neighbours.kept else ""
    if owners == {FLASH_ATTENTION}:
        mend = "torch.nn.attention.restore_flash_attention_impl(), or activate it before opgraft's"
        return "problem", f"{mend} overrides are registered"
    if owners <= {"torch._native"}:  # it passes on the calls that it does not take
        return "note", "TORCH_DISABLE_NATIVE_JIT=1 keeps torch._native's kernels out"
    mend = "register it before the first override of that op, or let it pass calls on"
    return "problem", mend


# ------------------------------------------------------------------ caches


def _caches() -> Iterator[Check]:
    path, refused = store.find(torch.__version__)
    root = store.root()
    cores = sorted(each.name for each in root.glob("_C_torch*/") if each.is_dir())
    if refused:
        yield Check("caches", "problem", refused)
    elif path is not None:
        yield Check("caches", "ok", f"cores: {root}, where only you and root can write")
    elif cores:
        text = f"cores: {root} has none for this torch, Python and version of opgraft"
        yield Check("caches", "note", f"{text}, but {', '.join(cores)}")
    else:
        yield Check("caches", "note", f"cores: {root} has none; one that was installed needs none")
    for name, place in _dsl_caches():
        if not place.is_dir():
            yield Check("caches", "note", f"{name}: {place}, not there yet")
        elif reason := store.why_untrusted(place):
            text = f"{name}: {place} holds code that {name} runs, and others could have written it"
            yield Check("caches", "problem", f"{text}: {reason}")
        else:
            yield Check("caches", "ok", f"{name}: {place}, where only you and root can write")


def _dsl_caches() -> Iterator[tuple[str, Path]]:
    if dsls.TRITON.available():
        cache = _trial("triton")[0].get("cache")
        if cache:
            yield "triton", Path(cache).expanduser()
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _default_inductor_cache()
    if inductor:
        yield "inductor", Path(inductor).absolute()


def _default_inductor_cache() -> str | None:
    # Run only this file, which has no imports of torch's: importing Inductor takes seconds. Do not
    # call its `cache_dir`, which creates the folder.
    file = Path(torch.__file__).parent / "_inductor" / "runtime" / "cache_dir_utils.py"
    try:
        place: str = runpy.run_path(str(file))["default_cache_dir"]()
    except Exception:  # a torch that defines it elsewhere
        return None
    return place


def _environment() -> Iterator[Check]:
    found = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)]
    if found:
        yield Check("environment", "note", ", ".join(found))
    for text in spelling.environment():
        yield Check("environment", "problem", text, "correct it, or unset it")
