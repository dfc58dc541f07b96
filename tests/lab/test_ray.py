"""The same rows from a Ray cluster of two nodes, also when one of them dies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from carryclip_lab.store.store import Store

HERE = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
STUDY = """
name = "study"
tier = "smoke"
[defaults]
task = "digits"
optimizer = "sgd"
lr = 0.1
batch = 64
seed = [0, 1, 2]
epochs = 5
[[grid]]
region = "Norm(0.5)"
carry = ["none", "full"]
[[grid]]
method = "faulty_methods:slow"
"""
SCRIPT = """
import json, sys, threading, time
from pathlib import Path
from rich.console import Console
from carryclip_lab import grid
from carryclip_lab.engine.settings import Options
from carryclip_lab.engine.supervise import supervise
from carryclip_lab.store.store import Store

def kill_soon(cluster, node, store):
    with Store(store) as opened:
        while sum(epochs for epochs, _ in opened.under_way().values()) < 4:
            time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)
    print("killed a node", flush=True)

if __name__ == "__main__":
    jobs = [(Path(study), Path(store), told) for study, store, told in json.loads(sys.argv[1])]
    _, store, told = jobs[0]
    if ray_too := told["engine"] == "ray":
        from ray.cluster_utils import Cluster
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        if told.pop("kill", False):
            threading.Thread(target=kill_soon, args=(cluster, second, store), daemon=True).start()
    codes = []
    for study, store, told in jobs:
        at = {"address": cluster.address} if ray_too else {}
        codes.append(supervise([grid.load(study)], store, Options(**told, **at), Console()))
        print("exit", codes[-1], flush=True)
    if ray_too:
        import ray
        for _ in range(100 if cluster.head_node and len(cluster.list_all_nodes()) == 1 else 1):
            alive = sum(node["Alive"] for node in ray.nodes())
            if alive == len(cluster.list_all_nodes()):
                break
            time.sleep(0.5)
        print("nodes", alive, flush=True)
        ray.shutdown()
        cluster.shutdown()
    (Path.cwd() / "codes").write_text(json.dumps(codes), encoding="utf-8")
"""


def run_studies(folder, studies):
    """By name, texts and options of studies that run on one cluster: their exit codes, and what was said."""
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    for name, (text, _) in studies.items():
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    jobs = [(f"{name}.toml", str(folder / f"{name}.sqlite"), options) for name, (_, options) in studies.items()]
    done = subprocess.run(
        [sys.executable, "script.py", json.dumps(jobs)],
        env=ENVIRONMENT,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return json.loads((folder / "codes").read_text(encoding="utf-8")), said


def rows(store):
    with Store(store, create=False) as opened:
        told = {run: [{**vars(e), "seconds": 0} for e in opened.epochs(run)] for run in opened.done()}
        records = opened.records("study")
        return [(each.spec, each.outcome, each.reached, told.get(each.spec.id)) for each in records]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The rows of an undisturbed local study."""
    folder = tmp_path_factory.mktemp("local")
    codes, out = run_studies(folder, {"a": (STUDY, {"engine": "local", "workers": 1})})
    assert codes == [0], out
    return rows(folder / "a.sqlite")


def faulty(*methods):
    """A study in which seed 1 of each method goes wrong."""
    head = STUDY.partition("[[grid]]")[0].replace("[0, 1, 2]", "[0, 1]").replace("epochs = 5", "epochs = 1")
    return head + "".join(f'[[grid]]\nmethod = "faulty_methods:{name}"\n' for name in methods)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Studies on one cluster, which takes longer to start than they do: one that is calm, two that go wrong.

    Only what hangs has a limit: a worker that dies needs time to come back, three times, on a machine that is busy.
    """
    pytest.importorskip("ray", reason="the cluster engine is an extra: in a clone, pip install './lab[ray]'")
    folder = tmp_path_factory.mktemp("cluster")
    studies = {
        "a": (STUDY, {"engine": "ray"}),
        "faulty": (faulty("nan", "fail", "segfault"), {"engine": "ray"}),
        "hanging": (faulty("hang"), {"engine": "ray", "timeout": 30 / 3600}),
    }
    return folder, *run_studies(folder, studies)


def test_a_cluster_of_two_nodes_gives_the_same_rows(cluster, quiet):
    folder, codes, out = cluster
    assert codes[0] == 0, out
    assert "nodes 2" in out
    assert rows(folder / "a.sqlite") == quiet


def test_so_it_does_when_one_of_them_dies(tmp_path, quiet):
    pytest.importorskip("ray", reason="the cluster engine is an extra: in a clone, pip install './lab[ray]'")
    codes, out = run_studies(tmp_path, {"a": (STUDY, {"engine": "ray", "kill": True})})
    assert codes == [0], out
    assert "killed a node" in out
    assert "nodes 1" in out
    assert rows(tmp_path / "a.sqlite") == quiet


LISTENING = """
import os
from carryclip_lab.engine.owners import new_owner
from carryclip_lab.engine.settings import Options
from carryclip_lab.engine.supervise import _engine
from carryclip_lab.store.store import Store

if __name__ == "__main__":
    with Store("a.sqlite") as store:
        _engine(store, new_owner(), Options(engine="ray"), None)
        import ray
        import psutil  # ray's own
        assert ray.get(ray.remote(lambda: "worked").remote()) == "worked"
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        ports = [port for each in family for port in each.net_connections("inet") if port.status == "LISTEN"]
        print(len(ports) > 3, sorted({port.laddr.ip.removeprefix("::ffff:") for port in ports}))
        print(os.environ["RAY_AUTH_MODE"])
"""


def test_a_cluster_that_is_started_here_listens_here_alone(tmp_path):
    pytest.importorskip("ray", reason="the cluster engine is an extra: in a clone, pip install './lab[ray]'")
    given = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("RAY_A")}
    command = [sys.executable, "-c", LISTENING]
    done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.splitlines() == ["True ['127.0.0.1']", "token"], done.stderr


def test_what_goes_wrong_on_a_cluster_is_an_outcome_too(cluster):
    folder, codes, out = cluster
    found, others = {}, set()
    for name in ("faulty", "hanging"):
        with Store(folder / f"{name}.sqlite") as store:
            for record in store.records("study"):
                if record.spec.seed == 1:
                    found[record.spec.label] = record
                else:
                    others.add(record.outcome)
    outcomes = {label: record.outcome for label, record in found.items()}
    assert outcomes == {"nan": "diverged", "fail": "crashed", "segfault": "crashed", "hang": "timeout"}, out
    assert "LookupError" in found["fail"].message
    assert "died 3 times" in found["segfault"].message
    assert others == {"not_reached"}
    assert codes[1:] == [1, 1]
