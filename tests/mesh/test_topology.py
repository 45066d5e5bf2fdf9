"""Devices by fast domain: the worked placements of the requirements, and what is refused."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import AXES, ClusterConfig, ConfigError, MeshConfig, load_config
from jaxtrain.mesh.topology import (
    DescribedDevice,
    build_topology,
    cross_domain_groups,
    described_devices,
    fast_domains,
    resolve_sizes,
)

NODES_8X8 = ClusterConfig(nodes=8, devices_per_node=8)
RACKS = load_config("clusters/gb300_nvl72").cluster


def nodes_of(topology):
    return np.vectorize(lambda device: device.process_index)(topology.devices)


def ids_of(topology):
    return np.vectorize(lambda device: device.id)(topology.devices)


# ---- sizes


def test_the_free_axis_takes_what_is_left():
    assert resolve_sizes(MeshConfig(data=-1, pipe=2, tensor=4), 64) == {
        "data": 8,
        "pipe": 2,
        "tensor": 4,
        "seq": 1,
        "expert": 1,
    }
    assert list(resolve_sizes(MeshConfig(data=2, seq=-1), 6)) == list(AXES)


@pytest.mark.parametrize(
    ("mesh", "devices", "words"),
    [
        (
            MeshConfig(data=3, tensor=2),
            8,
            ["data 3 x pipe 1 x tensor 2", "= 6 devices", "there are 8", "mesh.data to 4"],
        ),
        (MeshConfig(data=-1, tensor=3), 8, ["mesh.data is -1", "= 3 does not divide 8"]),
        (MeshConfig(data=5, tensor=3), 8, ["= 15 devices", "product is 8"]),
    ],
)
def test_sizes_that_do_not_multiply_out_show_the_arithmetic(mesh, devices, words):
    with pytest.raises(ConfigError) as error:
        resolve_sizes(mesh, devices)
    for word in words:
        assert word in str(error.value)


# ---- worked placements


def test_configuration_a_keeps_each_replica_on_its_node():
    topology = build_topology(MeshConfig(data=8, tensor=8), NODES_8X8, described_devices(NODES_8X8))
    assert nodes_of(topology).reshape(8, 8).tolist() == [[node] * 8 for node in range(8)]
    assert topology.crossings() == {"data": 8, "pipe": 1, "tensor": 1, "seq": 1, "expert": 1}


def test_configuration_b_puts_stage_s_of_the_replicas_on_nodes_s_and_4_plus_s():
    topology = build_topology(MeshConfig(data=2, pipe=4, tensor=8), NODES_8X8, described_devices(NODES_8X8))
    for stage in range(4):
        assert set(nodes_of(topology)[0, stage].ravel()) == {stage}
        assert set(nodes_of(topology)[1, stage].ravel()) == {4 + stage}
    assert topology.crossings() == {"data": 2, "pipe": 4, "tensor": 1, "seq": 1, "expert": 1}


def test_replicas_that_fit_share_a_domain_and_the_pipeline_crosses():
    cluster = ClusterConfig(nodes=4, devices_per_node=8)
    topology = build_topology(MeshConfig(data=2, pipe=4, tensor=4), cluster, described_devices(cluster))
    assert topology.crossings() == {"data": 1, "pipe": 4, "tensor": 1, "seq": 1, "expert": 1}
    half = build_topology(MeshConfig(data=4, pipe=2, tensor=4), cluster, described_devices(cluster))
    assert half.crossings() == {"data": 2, "pipe": 2, "tensor": 1, "seq": 1, "expert": 1}


def test_144_gpus_in_racks_of_72_hold_one_whole_instance_each():
    """Requirements 6: in the scheduler's order an instance spans racks, 8 + 64; by domain each rack holds one."""
    devices = described_devices(RACKS, 144)
    # The scheduler begins with the last 8 GPUs of the first rack.
    handed = devices[64:72] + devices[72:136] + devices[136:] + devices[:64]
    mesh = MeshConfig(data=2, tensor=8, expert=9)
    as_handed = np.array([d.id // 72 for d in handed]).reshape(2, 1, 8, 1, 9)
    spanning = cross_domain_groups(as_handed)
    assert [{rack: len(where) for rack, where in members.items()} for _, members in spanning] == [
        {0: 8, 1: 64},
        {0: 64, 1: 8},
    ]

    topology = build_topology(mesh, RACKS, handed)
    assert cross_domain_groups(topology.domain) == []
    assert ids_of(topology)[0, 0, :, 0, 0].tolist() == list(range(8)), "tensor groups are neighbours"
    assert [set(ids.ravel() // 72) for ids in ids_of(topology)] == [{0}, {1}]
    assert topology.crossings() == {"data": 2, "pipe": 1, "tensor": 1, "seq": 1, "expert": 1}


@pytest.mark.parametrize("order", [(0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 0, 1)])
def test_ranks_in_any_order_over_hosts_form_groups_inside_hosts(order):
    devices = [DescribedDevice(id=i, process_index=i // 2) for i in range(8)]
    hosts = [order.index(host) for host in order]
    topology = build_topology(MeshConfig(data=2, tensor=4), ClusterConfig(domain_size=4), devices, hosts)
    groups = [[order[device.process_index] for device in group.ravel()] for group in topology.devices]
    assert sorted(groups) == [[0] * 4, [1] * 4]
    if order == (0, 1, 0, 1):
        unknown = build_topology(MeshConfig(data=2, tensor=4), ClusterConfig(domain_size=4), devices)
        assert [order[device.process_index] for device in unknown.devices[0].ravel()] == [0, 0, 1, 1]


def test_an_instance_larger_than_a_domain_is_refused_with_the_group_and_the_fix():
    cluster = ClusterConfig(nodes=9, devices_per_node=64)
    with pytest.raises(ConfigError) as error:
        build_topology(MeshConfig(data=8, tensor=8, expert=9), cluster, described_devices(cluster))
    text = str(error.value)
    assert "tensor 8 x expert 9 group at (data 0, pipe 0, seq 0) spans 2 fast domains, 64 + 8 devices" in text
    assert "domain 0 (process 0): 64 devices, ids 0-63" in text
    assert "domain 1 (process 1): 8 devices, ids 64-71" in text
    assert "9 domains of 64" in text
    assert "cluster.domain_size" in text and "mesh.allow_cross_domain: [expert]" in text


def test_allow_cross_domain_lets_experts_leave_but_keeps_tensor_groups_whole():
    cluster = ClusterConfig(nodes=9, devices_per_node=64)
    mesh = MeshConfig(data=8, tensor=8, expert=9, allow_cross_domain=["expert"])
    topology = build_topology(mesh, cluster, described_devices(cluster))
    assert topology.crossings()["tensor"] == 1
    assert topology.crossings()["expert"] == 2
    with pytest.raises(ConfigError, match=r"tensor 16 group .* spans 2 fast domains, 8 \+ 8"):
        build_topology(
            MeshConfig(tensor=16, expert=4, allow_cross_domain=["expert"]), NODES_8X8, described_devices(NODES_8X8)
        )


def test_allow_cross_domain_tensor_keeps_expert_groups_whole():
    mesh = MeshConfig(tensor=16, expert=2, allow_cross_domain=["tensor"])
    topology = build_topology(mesh, NODES_8X8, described_devices(NODES_8X8))
    assert topology.crossings()["expert"] == 1 and topology.crossings()["tensor"] == 4
    both = MeshConfig(tensor=16, expert=4, allow_cross_domain=["tensor", "expert"])
    assert build_topology(both, NODES_8X8, described_devices(NODES_8X8)).devices.shape == (1, 1, 16, 1, 4)


# ---- domains


def test_processes_of_one_gpu_merge_and_large_processes_split():
    one_gpu_each = [DescribedDevice(id=i, process_index=i) for i in range(16)]
    merged = fast_domains(one_gpu_each, ClusterConfig(domain_size=8))
    assert [[d.id for d in domain] for domain in merged] == [list(range(8)), list(range(8, 16))]
    assert len(fast_domains(one_gpu_each, ClusterConfig())) == 16
    split = fast_domains([DescribedDevice(id=i, process_index=0) for i in range(8)], ClusterConfig(domain_size=4))
    assert [len(domain) for domain in split] == [4, 4]


def test_uneven_domains_are_refused_by_name():
    devices = described_devices(NODES_8X8, 64)
    lame = [d for d in devices if d.id != 27]
    with pytest.raises(ConfigError, match=r"63 devices in domains of 8, but domain 3 \(process 3\) has 7"):
        build_topology(MeshConfig(), ClusterConfig(), lame)
    with pytest.raises(ConfigError, match=r"uneven domains: 100 devices in domains of 72, but domain 1"):
        build_topology(MeshConfig(), RACKS, described_devices(RACKS, 100))


def test_a_domain_that_cuts_through_processes_is_refused():
    devices = [DescribedDevice(id=i, process_index=i // 6) for i in range(24)]
    with pytest.raises(ConfigError, match=r"cluster\.domain_size 8 splits a process: domain 0"):
        build_topology(MeshConfig(), ClusterConfig(domain_size=8), devices)


def test_a_backend_that_knows_hosts_mends_cyclic_ranks():
    class Real(DescribedDevice):
        @property
        def slice_index(self):
            return self.process_index % 2

    devices = [Real(id=i, process_index=i) for i in range(16)]
    domains = fast_domains(devices, ClusterConfig(domain_size=8))
    assert [{d.slice_index for d in domain} for domain in domains] == [{0}, {1}]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_mesh_is_whole_exactly_when_the_group_divides_a_domain(data):
    small = st.sampled_from([1, 2, 3, 4])
    sizes = {axis: data.draw(small, label=axis) for axis in AXES}
    total = math.prod(sizes.values())
    domain = data.draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]), label="domain")
    cluster = ClusterConfig(nodes=total // domain, devices_per_node=domain)
    handed = data.draw(st.permutations(described_devices(cluster)))
    mesh = MeshConfig(**sizes)
    group = sizes["tensor"] * sizes["expert"]
    if domain % group:
        with pytest.raises(ConfigError, match="spans"):
            build_topology(mesh, cluster, handed)
        return
    topology = build_topology(mesh, cluster, handed)
    assert topology.sizes == sizes
    assert sorted(ids_of(topology).ravel()) == list(range(total))
    assert (topology.domain == ids_of(topology) // domain).all()
    for place in itertools.product(range(sizes["data"]), range(sizes["pipe"]), range(sizes["seq"])):
        d, p, s = place
        assert len(set(topology.domain[d, p, :, s, :].ravel())) == 1
    assert (ids_of(topology) == ids_of(build_topology(mesh, cluster, described_devices(cluster)))).all()


# ---- real devices, shipped clusters


def test_simulated_devices_of_one_process_are_one_domain():
    topology = build_topology(MeshConfig(data=1, tensor=8), ClusterConfig())
    assert topology.crossings()["tensor"] == 1
    mesh = topology.mesh()
    assert mesh.axis_names == AXES and dict(mesh.shape) == topology.sizes
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    with pytest.raises(ConfigError, match=r"spans 2 fast domains, 4 \+ 4"):
        build_topology(MeshConfig(data=1, tensor=8), ClusterConfig(domain_size=4))


def test_fewer_devices_than_a_domain_are_one_domain():
    assert len(fast_domains(described_devices(RACKS, 8), RACKS)) == 1


@pytest.mark.parametrize(
    ("name", "devices", "domains"),
    [("a100_8x8", 64, 8), ("h100_8x8", 64, 8), ("h200_8x8", 64, 8), ("b200_8x8", 64, 8)]
    + [("gb200_nvl72", 72, 1), ("gb300_nvl72", 72, 1)],
)
def test_shipped_clusters(name, devices, domains):
    cluster = load_config(f"clusters/{name}").cluster
    assert cluster.name == name and cluster.device and cluster.memory_gb
    found = described_devices(cluster)
    assert len(found) == devices and len(fast_domains(found, cluster)) == domains
    assert {d.device_kind for d in found} == {cluster.device}


def test_the_requirements_memory_bounds_hold_on_shipped_clusters():
    """Requirements 3: 16 bytes a parameter: 70B needs 14 H100-80GB, 1T needs 56 GB300-288GB."""
    for name, parameters, devices in [("h100_8x8", 70e9, 14), ("gb300_nvl72", 1e12, 56)]:
        memory = load_config(f"clusters/{name}").cluster.memory_gb * 1e9
        assert math.ceil(16 * parameters / memory) == devices


def test_devices_of_an_undescribed_cluster_come_in_nodes_of_eight():
    assert [d.process_index for d in described_devices(ClusterConfig(), 16)] == [0] * 8 + [1] * 8
    assert {d.process_index for d in described_devices(ClusterConfig(), 12)} == {0}
    with pytest.raises(ConfigError, match=r"cluster\.nodes is null"):
        described_devices(ClusterConfig())
