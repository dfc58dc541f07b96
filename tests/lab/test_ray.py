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
    study, store, told = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    if told["engine"] == "ray":
        from ray.cluster_utils import Cluster
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        if told.pop("kill", False):
            threading.Thread(target=kill_soon, args=(cluster, second, store), daemon=True).start()
        told["address"] = cluster.address
    limited, hours = told.pop("limited", None), told.pop("timeout", None)
    loaded = grid.load(study)
    methods = {str(spec.method) for spec in loaded.specs}
    code = supervise([loaded], store, Options(**told), Console(), {"method": methods - {limited}})
    if limited is not None:
        code = supervise([loaded], store, Options(**told, timeout=hours), Console(), {"method": {limited}})
    print("exit", code, flush=True)
    if told["engine"] == "ray":
        import ray
        for _ in range(100 if cluster.head_node and len(cluster.list_all_nodes()) == 1 else 1):
            alive = sum(node["Alive"] for node in ray.nodes())
            if alive == len(cluster.list_all_nodes()):
                break
            time.sleep(0.5)
        print("nodes", alive, flush=True)
        ray.shutdown()
        cluster.shutdown()
    sys.exit(code)
"""


def run_study(folder, store, study=STUDY, **options):
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    (folder / "study.toml").write_text(study, encoding="utf-8")
    arguments = [sys.executable, "script.py", "study.toml", str(store), json.dumps(options)]
    done = subprocess.run(
        arguments, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=1200, check=False
    )
    return done.returncode, done.stdout + done.stderr


def rows(store):
    with Store(store, create=False) as opened:
        told = {run: [{**vars(e), "seconds": 0} for e in opened.epochs(run)] for run in opened.done()}
        records = opened.records("study")
        return [(each.spec, each.outcome, each.reached, told.get(each.spec.id)) for each in records]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The rows of an undisturbed local study."""
    folder = tmp_path_factory.mktemp("local")
    code, out = run_study(folder, folder / "a.sqlite", engine="local")
    assert code == 0, out
    return rows(folder / "a.sqlite")


@pytest.mark.parametrize("kill", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_cluster_of_two_nodes_gives_the_same_rows(tmp_path, quiet, kill):
    pytest.importorskip("ray", reason="the cluster engine is an extra: in a clone, pip install './lab[ray]'")
    code, out = run_study(tmp_path, tmp_path / "a.sqlite", engine="ray", kill=kill)
    assert code == 0, out
    assert ("killed a node" in out) == kill, out
    assert f"nodes {1 if kill else 2}" in out
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
    done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.splitlines() == ["True ['127.0.0.1']", "token"], done.stderr


def test_what_goes_wrong_on_a_cluster_is_an_outcome_too(tmp_path):
    pytest.importorskip("ray", reason="the cluster engine is an extra: in a clone, pip install './lab[ray]'")
    head = STUDY.partition("[[grid]]")[0].replace("[0, 1, 2]", "[0, 1]").replace("epochs = 5", "epochs = 1")
    grids = [f'[[grid]]\nmethod = "faulty_methods:{name}"\n' for name in ("nan", "fail", "segfault", "hang")]
    # Of the limit only what hangs may know: how long the others take depends on what else the machine does.
    limit = {"limited": "faulty_methods:hang", "timeout": 10 / 3600}
    code, out = run_study(tmp_path, tmp_path / "a.sqlite", head + "".join(grids) + "seed = 1\n", engine="ray", **limit)
    with Store(tmp_path / "a.sqlite") as store:
        found = {record.spec.label: record for record in store.records("study") if record.spec.seed == 1}
        others = {record.outcome for record in store.records("study") if record.spec.seed == 0}
    outcomes = {label: record.outcome for label, record in found.items()}
    assert outcomes == {"nan": "diverged", "fail": "crashed", "segfault": "crashed", "hang": "timeout"}, out
    assert "LookupError" in found["fail"].message
    assert "died 3 times" in found["segfault"].message
    assert others == {"not_reached"}
    assert code == 1
