"""Launch plans that a worker records and keeps, and that this process and others load."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import opgraft
from opgraft.cache import plans as cache_plans
from opgraft.core import loader
from opgraft.ops.schema import Call, resolve
from opgraft.plan import plans, proof
from opgraft.ready import pool, readiness
from tests.ready import impls

pytestmark = pytest.mark.skipif(loader.in_use() is None, reason="plans need the compiled core")

LIMIT = 200
Register = Callable[..., opgraft.Override]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A worker serves one test after the other."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPGRAFT_CACHE", str(place))
        yield place
        end_workers()


@pytest.fixture(autouse=True)
def kept(own_cache: Path) -> Iterator[Path]:
    """Where plans are kept: those of one test are not the next's."""
    place = own_cache / "kernels"
    yield place
    pools = pool.shared(), pool.loading()
    if not all(each.is_idle for one in pools for each in one._attendants):
        end_workers()
    place.unlink() if place.is_file() else shutil.rmtree(place, ignore_errors=True)


def end_workers() -> None:
    pool.shared().close()
    pool.loading().close()
    pool._forget_in_child()


@pytest.fixture
def register() -> Iterator[Register]:
    made: list[opgraft.Override] = []

    def register(impl: Callable[..., Any], op: str = "neg", **options: Any) -> opgraft.Override:
        given = {"launch_plan": True, "when_not_ready": "native", "name": f"kept-{len(made)}"}
        override = opgraft.register_op_override(
            "aten", op, "CPU", impl, unconditional_override=True, **given | options
        )
        made.append(override)
        return override

    yield register
    for each in made:
        each.remove()


NAN, INF = float("nan"), float("inf")


def states(override: opgraft.Override) -> list[readiness.State]:
    assert override.plans is not None
    return override.plans.readiness.states()


def negate(size: int = 4, calls: int = 1) -> None:
    for _ in range(calls):
        x = torch.arange(size, dtype=torch.float32) + 1
        assert torch.equal(torch.neg(x), 0 - x)


def prove(override: opgraft.Override) -> None:
    """Have a plan made and loaded, and compared with native as often as it must be."""
    negate()
    assert opgraft.wait_until_ready(LIMIT)
    negate(calls=proof.REPLAYS)
    assert override.hits == 0


def test_a_plan_is_made_where_the_kernels_are_compiled(register: Register) -> None:
    override = register(impls.negated)
    prove(override)
    (plan,) = override.plans
    assert plan.is_proven and plan.steps == "call aten::rsub.Scalar"
    assert override.plans.recordings == 0
    negate(calls=3)
    assert override.hits == 3 and plan.hits + 3 == next(iter(override.plans)).hits


@pytest.mark.parametrize("impl", [impls.times_minus_one, impls.negated_by_product])
@pytest.mark.parametrize("autocast", [False, True])
def test_ops_that_autocast_would_change(
    register: Register, impl: Callable[..., Any], autocast: bool
) -> None:
    override = register(impl)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        prove(override)
        negate()
    assert override.hits == 1
    assert override.plans.recordings == 0


def test_native_that_raises_proves_nothing() -> None:
    core = loader.in_use()
    assert core is not None
    call = Call(resolve("aten::neg"), (torch.ones(2),))
    one = proof.Proof(mock.Mock())

    def raises(call: Call) -> torch.Tensor:
        raise IndexError("out of range")

    for _ in range(proof.REPLAYS):
        with pytest.raises(IndexError):
            one.run(mock.Mock(), call, raises)
    router = mock.Mock(replay=lambda plan, values, poison: 0 - values[0])
    for _ in range(proof.REPLAYS):
        one.run(router, call, lambda each: 0 - each.values[0])
    assert one.is_done, one.difference


def test_an_interrupt_leaves_the_replay_to_a_later_call() -> None:
    call = Call(resolve("aten::neg"), (torch.ones(2),))
    one = proof.Proof(mock.Mock())
    interrupted = mock.Mock()
    interrupted.replay.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        one.run(interrupted, call, lambda each: 0 - each.values[0])
    router = mock.Mock(replay=lambda plan, values, poison: 0 - values[0])
    for _ in range(proof.REPLAYS):
        one.run(router, call, lambda each: 0 - each.values[0])
    assert one.is_done, one.difference


def test_arguments_that_cannot_be_copied_are_natives(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(resolve("aten::neg_"), (torch.ones(2),))
    one = proof.Proof(mock.Mock())
    monkeypatch.setattr(
        "opgraft.plan.proof.copies.copy_call", mock.Mock(side_effect=RuntimeError("no copy"))
    )
    result = one.run(mock.Mock(), call, lambda each: each.values[0].neg_())
    assert torch.equal(result, torch.tensor([-1.0, -1.0]))
    assert "no copy" in one.difference


#: CUDA's own error has another type than that of torch's allocator.
OUT_OF_MEMORY = [torch.OutOfMemoryError("1 GiB"), RuntimeError("CUDA error: out of memory")]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_replay_without_memory_is_left_to_a_later_call(error: Exception) -> None:
    call = Call(resolve("aten::neg"), (torch.ones(2),))
    one = proof.Proof(mock.Mock())
    router = mock.Mock()
    negative = -torch.ones(2)
    router.replay.side_effect = [error, *[negative.clone() for _ in range(proof.REPLAYS)]]
    for _ in range(1 + proof.REPLAYS):
        one.run(router, call, lambda each: 0 - each.values[0])
    assert one.is_done, one.difference


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_arguments_for_whose_copies_there_is_no_memory_are_left_to_a_later_call(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(resolve("aten::neg_"), (torch.ones(2),))
    one = proof.Proof(mock.Mock())
    monkeypatch.setattr("opgraft.plan.proof.copies.copy_call", mock.Mock(side_effect=error))
    one.run(mock.Mock(), call, lambda each: each.values[0].neg_())
    assert one.difference == ""


def test_threads_that_look_at_once_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = proof._Verdict.__new__(proof._Verdict)
    others: list[threading.Thread] = []

    class Found:
        """The first is no difference, and of the second nothing can be said."""

        def __init__(self, one: torch.Tensor, other: torch.Tensor, *, finite: bool) -> None:
            self.device = one.device
            self.is_first = bool(one)

        def found(self) -> bool | None:
            if not others:
                others.append(threading.Thread(target=verdict.look))
                others[0].start()
                others[0].join(0.5)  # as long as it takes it to read all, unless it waits
            return False if self.is_first else None

    monkeypatch.setattr("opgraft.plan.proof.outputs.Difference", Found)
    pairs = [(str(each), torch.tensor(each), torch.tensor(each)) for each in (True, False)]
    verdict.__init__(pairs, 0, finite=True)  # type: ignore[misc]
    others[0].join()
    assert verdict.is_open and not verdict.agrees


@pytest.mark.parametrize("returned", [INF, -INF, NAN, 1.0])
@pytest.mark.parametrize("waits", [False, True])
def test_numbers_that_are_not_finite_are_compared_by_later_calls(
    returned: float, waits: bool
) -> None:
    call = Call(resolve("aten::neg"), (torch.tensor([1.0, INF]),))
    one = proof.Proof(mock.Mock(), waits=waits)
    poisons = []

    def replay(plan: object, values: object, poison: int) -> torch.Tensor:
        poisons.append(poison)
        return torch.tensor([-1.0, returned])

    router = mock.Mock(replay=replay)
    for _ in range(3 * proof.REPLAYS):
        one.run(router, call, lambda each: 0 - each.values[0])
    assert one.is_done == (returned == -INF)
    assert bool(one.difference) == (returned != -INF)
    # With each of them it is compared once more, where nothing could be said before.
    assert sorted(poisons) == sorted((1 if waits else 2) * proof._POISONS)


def test_proofs_go_with_the_plans_that_are_evicted(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = register(impls.negated)
    found = override.plans
    assert found is not None
    negate()
    assert opgraft.wait_until_ready(LIMIT)
    (key,) = found._proofs
    assert found.is_unproven(key)
    found.table.drop(key)
    assert not found.is_unproven(key)
    monkeypatch.setattr(plans, "MAX_PLANS", 1)
    negate(size=5)
    assert opgraft.wait_until_ready(LIMIT)
    assert len(found._proofs) == 1 and key not in found._proofs


def after_install(override: opgraft.Override, do: Callable[[], object]) -> None:
    """Have another thread do something as soon as a plan is installed, before that is noted."""
    assert override.plans is not None
    of_override = override.plans.readiness
    install = of_override._install

    def install_and_do(*arguments: Any) -> None:
        install(*arguments)
        thread = threading.Thread(target=do)
        thread.start()
        thread.join()

    of_override._install = install_and_do


def test_a_plan_that_calls_drop_while_it_is_loaded_is_not_noted_as_ready(
    register: Register,
) -> None:
    override = register(impls.doubled)
    after_install(override, lambda: negate(calls=proof.REPLAYS + 1))
    negate()
    assert opgraft.wait_until_ready(LIMIT)
    (state,) = states(override)
    assert state.status == "dropped" and "differs from native" in state.reason
    negate(calls=3)
    assert override.hits == 0


def test_plans_that_are_dropped_while_one_is_loaded_are_asked_for_again(
    register: Register,
) -> None:
    override = register(impls.negated)
    assert override.plans is not None
    after_install(override, override.plans.clear)
    negate()
    assert opgraft.wait_until_ready(LIMIT)
    assert states(override) == []
    override.plans.readiness._install = override.plans._install_loaded
    prove(override)
    negate()
    assert override.hits == 1


def test_a_proof_of_dropped_plans_proves_no_others(register: Register) -> None:
    override = register(impls.negated)
    found = override.plans
    assert found is not None
    negate()
    assert opgraft.wait_until_ready(LIMIT)
    negate(calls=proof.REPLAYS - 1)
    known = proof.Proof.run

    def run(self: proof.Proof, *arguments: Any) -> Any:
        result = known(self, *arguments)
        found._proofs.update(dict.fromkeys(found._proofs, proof.Proof(mock.Mock())))
        return result

    with mock.patch.object(proof.Proof, "run", run):
        negate()
    assert not next(iter(found)).is_proven


def test_where_no_plan_can_be_kept_the_calls_are_recorded_here(
    register: Register, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept.touch()  # where a folder would be: as on a full disk, nothing is kept
    override = register(impls.negated)
    negate()
    assert opgraft.wait_until_ready(LIMIT)
    (state,) = states(override)
    assert state.status == "ready" and state.by.startswith("worker")
    negate(calls=3)
    assert override.hits == 3 and override.plans is not None and override.plans.recordings > 0
    assert not caplog.records


@pytest.mark.parametrize("start", range(24))
def test_a_damaged_entry_is_no_plan(
    kept: Path, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    kept.mkdir(mode=0o700)
    key = {"of": "a test"}
    cache_plans.write(key, {"steps": []}, [], {})
    (entry,) = kept.glob("*.json")
    content = entry.read_bytes()
    for index in range(start, len(content), 24):
        for byte in (0, 0xFF, content[index] ^ 1):
            entry.write_bytes(content[:index] + bytes([byte]) + content[index + 1 :])
            caplog.clear()
            assert cache_plans.find(key) is None
            assert len(caplog.records) == 1
        entry.write_bytes(content[: min(index, len(content) - 2)])  # all but the newline is whole
        assert cache_plans.find(key) is None
    entry.write_bytes(content)
    assert cache_plans.find(key) is not None


def test_a_plan_that_differs_from_native_is_dropped(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    override = register(impls.doubled)
    negate()
    assert opgraft.wait_until_ready(LIMIT)
    negate(calls=proof.REPLAYS + 3)
    assert override.hits == 0 and not list(override.plans)
    (line,) = (each for each in caplog.records if "is dropped" in each.getMessage())
    assert "differ" in line.getMessage()
    (state,) = states(override)
    assert state.status == "dropped" and "differs from native" in state.reason


def test_a_disabled_override_loads_its_plans_again(register: Register) -> None:
    override = register(impls.negated)
    prove(override)
    negate()
    assert override.hits == 1
    with opgraft.disabled(name=override.name):
        negate()
    opgraft.disable(name=override.name)
    opgraft.enable(name=override.name)
    assert not list(override.plans)
    prove_again = override.hits
    negate()
    assert opgraft.wait_until_ready(LIMIT)
    negate(calls=proof.REPLAYS)
    assert override.hits == prove_again
    negate()
    assert override.hits == prove_again + 1


@pytest.mark.parametrize(
    "impl", [impls.negated_by_where_it_begins, impls.negated_by_its_memory], ids=["offset", "size"]
)
def test_a_plan_holds_nothing_that_its_key_does_not(
    register: Register, impl: Callable[..., Any]
) -> None:
    """Where a tensor begins in its memory, and how large that is, differs between two calls."""
    override = register(impl)
    negate()
    assert opgraft.wait_until_ready(LIMIT)
    negate(calls=6)
    assert override.hits == 6 and not list(override.plans)
