"""What collectives cost, by the closed forms of rings."""

from dataclasses import replace

from meshwright.planner.links import HOST_LINK, LATENCY, LINK_SHARE, Group, Links
from meshwright.planner.machines import UNKNOWN_LINK, parse_machine
from meshwright.planner.speed import CollectivePoint, Speed

import pytest

GIB = 2.0**30


def links(spec: str) -> Links:
    return Links(parse_machine(spec), Speed())


def test_a_ring_sends_all_but_one_part_twice_around() -> None:
    machine = parse_machine("8xH200")
    assert machine.link.bandwidth is not None
    assert machine.link.latency is not None
    expected = 2 * 7 / 8 * GIB / (LINK_SHARE * machine.link.bandwidth)
    expected += 14 * machine.link.latency
    assert links("8xH200").all_reduce(GIB, Group(8, 1)) == pytest.approx(expected)


def test_gathering_is_half_of_an_all_reduce() -> None:
    found = links("8xH200")
    whole = found.all_reduce(GIB, Group(8, 1))
    assert found.all_gather(GIB, Group(8, 1)) == pytest.approx(whole / 2)
    assert found.reduce_scatter(GIB, Group(8, 1)) == pytest.approx(whole / 2)


def test_one_device_has_nobody_to_talk_to() -> None:
    assert links("8xH200").all_reduce(GIB, Group(1, 1)) == 0
    assert links("8xH200").all_gather(0, Group(8, 1)) == 0


def test_between_hosts_the_network_is_the_limit() -> None:
    machine = parse_machine("4x8xH100")
    assert machine.network.bandwidth is not None
    one_per_host = links("4x8xH100").all_reduce(GIB, Group(4, 8))
    expected = 2 * 3 / 4 * GIB / (LINK_SHARE * machine.network.bandwidth)
    assert one_per_host == pytest.approx(expected, rel=1e-2)


def test_devices_of_a_host_share_the_way_out() -> None:
    found = links("4x8xH100")
    across = found.all_reduce(GIB, Group(32, 1))
    assert found.all_reduce(GIB, Group(8, 1)) < across
    assert across < found.all_reduce(GIB, Group(4, 8))


def test_links_that_nobody_knows_are_taken_for_a_bus_of_the_host() -> None:
    machine = replace(parse_machine("8xH200"), link=UNKNOWN_LINK)
    expected = LATENCY + GIB / (LINK_SHARE * HOST_LINK)
    sent = Links(machine, Speed()).send(GIB, Group(2, 1))
    assert sent == pytest.approx(expected)


def test_what_was_timed_here_counts_more_than_what_is_calculated() -> None:
    points = (
        CollectivePoint("all_reduce", 8, 1000.0, 1.0),
        CollectivePoint("all_reduce", 8, 3000.0, 2.0),
    )
    here = Links(parse_machine(None), Speed(collectives=points))
    assert here.all_reduce(2000, Group(8, 1)) == pytest.approx(1.5)
    assert here.all_reduce(6000, Group(8, 1)) == pytest.approx(4.0)
    elsewhere = Links(parse_machine("8xH200"), Speed(collectives=points))
    assert elsewhere.all_reduce(2000, Group(8, 1)) < 1e-3


def test_programs_for_cpus_sum_everything_everywhere() -> None:
    points = (CollectivePoint("all_reduce", 4, 2.0**20, 0.25),)
    links = Links(parse_machine(None), Speed(collectives=points))
    group = Group(4, 1)
    assert links.reduce_scatter(2**20, group) == 0.25


def test_devices_that_share_cores_wait_for_each_other_as_was_timed() -> None:
    speed = Speed(collectives=[CollectivePoint("wait", 4, 0.0, 2e-4)])
    here = replace(parse_machine("8xH200"), is_here=True)
    assert Links(here, speed).waiting(Group(4, 1)) == 2e-4
    assert Links(here, speed).waiting(Group(2, 1)) == 0.0
    assert links("8xH200").waiting(Group(8, 1)) == 0.0
