"""One exporter has the metrics, however many ask."""

from __future__ import annotations

from coldblock.engine_core.exporter import LEASE_S, ExporterLease


def holder_after(*asked: tuple[str, float]) -> str:
    lease = ExporterLease()
    for name, at in asked:
        lease.ask(name, at)
    return lease.holder


def test_the_first_that_asks_keeps_it_by_asking() -> None:
    assert holder_after(("a", 0.0), ("b", 1.0)) == "a"
    assert holder_after(("a", 0.0), ("a", LEASE_S - 1), ("b", LEASE_S + 1)) == "a"


def test_another_gets_it_when_the_holder_asks_no_more() -> None:
    assert holder_after(("a", 0.0), ("b", LEASE_S)) == "b"
    assert holder_after(("a", 0.0), ("b", LEASE_S), ("a", LEASE_S + 1)) == "b"


def test_another_gets_it_at_once_when_the_holder_leaves() -> None:
    lease = ExporterLease()
    lease.ask("a", 0.0)
    lease.leave("b")
    lease.ask("b", 1.0)
    assert lease.holder == "a"
    lease.leave("a")
    lease.ask("b", 2.0)
    assert lease.holder == "b"
