"""Placement: spread, scaling, rollouts; and by simulation that a rollout never serves with fewer workers."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvist_controller.placement import NewSlot, NodeView, Plan, SlotView, plan


def node(uid: str, *, slots: int = 0, processors: int = 8, engines: tuple[str, ...] = ("sim",)) -> NodeView:
    return NodeView(uid=uid, engines=frozenset(engines), slots=slots, processors=processors)


def slot(ordinal: int, *, node_uid: str = "a", revision: str = "new", **flags: bool) -> SlotView:
    flags = {"is_ready": True, **flags}
    return SlotView(uid=f"s{ordinal}", ordinal=ordinal, node_uid=node_uid, revision=revision, **flags)


def step(desired: int, slots: list[SlotView], nodes: list[NodeView]) -> Plan:
    return plan(desired=desired, revision="new", engine="sim", slots=slots, nodes=nodes)


def test_new_slots_spread_over_the_least_loaded_nodes_that_offer_the_engine() -> None:
    nodes = [node("a", slots=3), node("b", slots=1), node("c", engines=("vllm",))]
    assert step(3, [], nodes).create == (NewSlot(0, "b"), NewSlot(1, "a"), NewSlot(2, "b"))


def test_a_service_spreads_over_nodes_before_it_fills_an_idle_one() -> None:
    nodes = [node("a", slots=0), node("b", slots=5)]
    assert {new.node_uid for new in step(2, [], nodes).create} == {"a", "b"}


def test_a_larger_node_takes_more() -> None:
    nodes = [node("a", processors=2, slots=1), node("b", processors=16, slots=1)]
    assert step(1, [], nodes).create == (NewSlot(0, "b"),)


def test_free_ordinals_are_used_again_but_not_those_of_draining_slots() -> None:
    slots = [slot(0), slot(1, is_draining=True), slot(3)]
    assert step(4, slots, [node("a")]).create == (NewSlot(2, "a"), NewSlot(4, "a"))


def test_scaling_down_drains_the_highest_ordinals() -> None:
    assert step(1, [slot(2), slot(0), slot(1)], [node("a")]) == Plan(drain=("s1", "s2"))


def test_scaling_to_zero_drains_all_and_creates_nothing() -> None:
    assert step(0, [slot(0), slot(1, revision="old")], [node("a")]) == Plan(drain=("s0", "s1"))


def test_without_a_fitting_node_replicas_stay_without_a_place() -> None:
    assert step(2, [], [node("a", engines=("vllm",))]) == Plan(unplaced=2)


def test_a_rollout_adds_one_then_takes_one() -> None:
    old = [slot(0, revision="old"), slot(1, revision="old")]
    assert step(2, old, [node("a")]) == Plan(create=(NewSlot(2, "a"),))
    starting = [*old, slot(2, is_ready=False)]
    assert step(2, starting, [node("a")]) == Plan()
    assert step(2, [*old, slot(2)], [node("a")]) == Plan(create=(NewSlot(3, "a"),), drain=("s1",))


def test_old_workers_that_serve_nothing_go_at_once() -> None:
    slots = [slot(0, revision="old", is_ready=False)]
    assert step(1, slots, [node("a")]) == Plan(create=(NewSlot(1, "a"),), drain=("s0",))


def test_a_lost_slot_is_replaced_when_there_is_a_place_and_kept_when_there_is_none() -> None:
    lost = [slot(0, node_uid="a", is_lost=True)]
    assert step(1, lost, [node("b")]) == Plan(create=(NewSlot(1, "b"),), drain=("s0",))
    assert step(1, lost, []) == Plan(unplaced=1)


@given(
    old=st.lists(st.booleans(), max_size=5),
    desired=st.integers(min_value=0, max_value=5),
    order=st.randoms(use_true_random=False),
)
def test_a_rollout_ends_and_never_serves_with_fewer_workers(old: list[bool], desired: int, order: object) -> None:
    nodes = [node("a"), node("b")]
    slots = [slot(n, revision="old", is_ready=ready) for n, ready in enumerate(old)]
    floor = min(desired, sum(old))
    for _ in range(200):
        decided = step(desired, slots, nodes)
        assert not decided.unplaced
        slots = [replace(s, is_draining=True) if s.uid in decided.drain else s for s in slots]
        for new in decided.create:
            slots.append(slot(new.ordinal, node_uid=new.node_uid, is_ready=False))
        active = [s for s in slots if not s.is_draining]
        assert sum(s.is_ready for s in active) >= floor
        assert len(active) <= max(desired + 1, len(old))
        # Something happens in the world: one starting worker gets ready, or one draining worker is gone.
        changeable = [s for s in slots if s.is_draining or not s.is_ready]
        if not changeable:
            break
        chosen = order.choice(changeable)  # type: ignore[attr-defined]
        slots = [replace(s, is_ready=True) if s is chosen else s for s in slots if s is not chosen or not s.is_draining]
    assert sorted(s.revision for s in slots) == ["new"] * desired
    assert len({s.ordinal for s in slots}) == len(slots)
