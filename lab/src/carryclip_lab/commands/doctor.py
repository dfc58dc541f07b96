"""The command behind ``carryclip doctor`` where the laboratory is installed: what the library says, and our part."""

from carryclip import doctor

PACKAGES = {
    "cyclopts": "commands",
    "rich": "commands",
    "matplotlib": "figures",
    "scikit-learn": "digits",
    "scipy": "intervals",
    "pebble": "studies on this machine",
    "ray": "studies on a cluster",
    "pooch": "data",
    "jinja2": "report",
    "pyarrow": "export",
    "pillow": "ImageNet",
    "grain": "ImageNet",
}


def main(*, as_json: bool = False) -> int:
    """Print the findings; 0 if everything that is installed works."""
    return doctor.main(PACKAGES, {"cifar10": _check_data}, as_json=as_json)


def _check_data() -> str:
    from carryclip_lab.data.cifar10 import DataError, cache_folder, load_cifar10

    try:
        load_cifar10()
    except DataError:
        return "not here; carryclip data cifar10 gets it"
    return f"in {cache_folder()}, checked"
