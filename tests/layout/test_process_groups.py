"""Which rank this is, by what the launcher left in the environment."""

import pytest

from moefold.config.errors import UserError
from moefold.layout.environment import Rendezvous, first_slurm_host, read_environment
from moefold.layout.process_groups import choose_device

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node3",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}


def test_torchruns_variables_are_read():
    assert read_environment(TORCHRUN) == Rendezvous(5, 8, 1, 4, "node3", 1234, attempt="2", agent=True)


def test_where_rank_0_serves_the_store_torchruns_counts_which_differ_between_nodes_are_not_read():
    served = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "a"}
    assert read_environment(served).attempt == "2"
    assert read_environment({**served, "TORCHELASTIC_USE_AGENT_STORE": "False"}).attempt == "0"


def test_rank_and_world_size_suffice_and_mean_one_machine():
    assert read_environment({"RANK": "1", "WORLD_SIZE": "2"}) == Rendezvous(1, 2, 1, 2)


def test_slurms_variables_are_read():
    assert read_environment(SLURM) == Rendezvous(5, 8, 1, 4, "gpu07", 20_000 + 123_456 % 20_000)


def test_torchrun_inside_slurm_is_torchrun():
    assert read_environment({**SLURM, **TORCHRUN}) == read_environment(TORCHRUN)


def test_master_address_and_port_win_over_what_slurm_implies():
    place = read_environment({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "7"})
    assert (place.host, place.port) == ("head", 7)


def test_all_ranks_of_a_slurm_job_meet_at_the_same_place_and_restarts_are_told_apart():
    places = [
        read_environment({**SLURM, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 4)}) for rank in range(8)
    ]
    assert len({(place.host, place.port) for place in places}) == 1
    assert [place.rank for place in places] == list(range(8))
    assert read_environment({**SLURM, "SLURM_RESTART_COUNT": "1"}).attempt == "1"


@pytest.mark.parametrize("env", [{}, {"RANK": "3"}, {"WORLD_SIZE": "4"}, {"SLURM_PROCID": "0"}, {"SLURM_NTASKS": "4"}])
def test_without_a_whole_answer_a_process_is_alone(env: dict[str, str]):
    assert read_environment(env) == Rendezvous(0, 1, 0, 1)


def test_a_slurm_job_of_one_task_is_alone():
    assert read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == Rendezvous()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a,b,c", "a"),
        ("node[07-09,12]", "node07"),
        ("node[3]", "node3"),
        ("node[1,3-5]", "node1"),
        ("a1,b[2-3]", "a1"),
        ("rack-2-[010-020]", "rack-2-010"),
        ("n[1-2],m[3-4]", "n1"),
        ("node7.cluster.example", "node7.cluster.example"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
    ],
)
def test_the_first_host_of_a_slurm_list_is_found(nodes: str, first: str):
    assert first_slurm_host({"SLURM_JOB_NODELIST": nodes}) == first


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node[1-2]-ib", "node1-ib"), ("n[1]x", "n1x"), ("rack[0-1]node[2-3]", "rack0node2"), ("n[1,3]x,z", "n1x")],
)
def test_the_first_host_of_a_slurm_list_with_a_suffix_is_found(nodes: str, first: str):
    assert first_slurm_host({"SLURM_JOB_NODELIST": nodes}) == first


def test_the_nodes_of_the_step_win_over_those_of_the_job():
    assert first_slurm_host({"SLURM_STEP_NODELIST": "b", "SLURM_JOB_NODELIST": "a"}) == "b"
    assert first_slurm_host({"SLURM_NODELIST": "c"}) == "c"
    assert first_slurm_host({}) == "127.0.0.1"


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "tcp://10.0.0.1:29500"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": ""},
    ],
)
def test_a_variable_that_is_no_number_is_refused_by_name(env: dict[str, str]):
    with pytest.raises(UserError):
        read_environment(env)


def test_the_cpu_is_chosen_when_asked_for():
    assert choose_device("cpu", Rendezvous()).type == "cpu"
