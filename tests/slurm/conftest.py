"""One cluster for all of these tests that a process runs."""

import os

import pytest

from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Skips where Slurm is not installed, unless REQUIRE_SLURM says that it must be."""
    lacking = missing()
    if lacking:
        reason = (
            f"needs Slurm ({', '.join(lacking)} not found): apt-get install "
            "--no-install-recommends slurmctld slurmd "
            "slurm-client munge iproute2"
        )
        assert not os.environ.get("REQUIRE_SLURM"), reason
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running
