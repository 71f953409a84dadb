"""A save asks the file system for things in the order that a power cut demands, as a recorder of
its calls sees it.

A name is worth nothing before the data that it names are on the disk, and nothing is deleted before
what replaces it is.
"""

import shutil

import pytest

from megatron_lite.checkpointing.step_files import LATEST
from tests.support.checkpoints import flip_bit
from tests.support.syscalls import recorded


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory, saved):
    """Step 1 is good, 2 is damaged, 3 is later than where a run goes on from."""
    root = tmp_path_factory.mktemp("beginning")
    saved.start(root, 0, [1, 2, 3])
    flip_bit(root / "iter_0000002" / "model_pp00_tp00of01.safetensors", 4001)
    (root / LATEST).write_text("2")
    return root


@pytest.fixture
def root(tmp_path, three_steps):
    return shutil.copytree(three_steps, tmp_path / "steps")


def calls_of_a_save(root, saved):
    """It sets steps 2 and 3 aside, and deletes step 1 and the old step 2."""
    with recorded() as calls:
        assert saved.start(root, 1, [2], save_keep_last=1) == 1
    assert sorted(path.name for path in root.glob("iter_*")) == [
        "iter_0000002",
        "iter_0000003.superseded",
    ]
    return calls


def index(calls, name, where, *, after=-1):
    """The place of the first such call after another one."""
    found = next(
        (
            place
            for place, call in enumerate(calls)
            if place > after and call.name == name and where(call)
        ),
        None,
    )
    assert found is not None, f"no such {name}"
    return found


def published(calls, root):
    return index(
        calls,
        "rename",
        lambda call: call.target == str(root / "iter_0000002") and ".tmp" in call.path,
    )


def pointed(calls, root):
    return index(calls, "rename", lambda call: call.target == str(root / LATEST))


def test_every_file_and_then_the_folder_is_synced_before_the_step_gets_its_name(root, saved):
    calls = calls_of_a_save(root, saved)
    place = published(calls, root)
    rename = calls[place]
    assert len(rename.times) == 7
    last = 0
    for file, changed in rename.times.items():
        synced = [
            number
            for number, call in enumerate(calls[:place])
            if call.name == "fsync" and call.path == file
        ]
        assert synced, f"{file} is not synced"
        assert calls[synced[-1]].times[file] == changed, f"{file} is written to after it was synced"
        last = max(last, synced[-1])
    assert index(calls, "fsync", lambda call: call.path == rename.path, after=last) < place


def test_the_name_is_on_the_disk_before_the_pointer_names_it(root, saved):
    calls = calls_of_a_save(root, saved)
    assert index(
        calls, "fsync", lambda call: call.path == str(root), after=published(calls, root)
    ) < pointed(calls, root)


def test_nothing_is_deleted_before_the_pointer_nor_set_aside_before_the_name_is_on_the_disk(
    root, saved
):
    calls = calls_of_a_save(root, saved)
    durable = {".superseded": published(calls, root), ".deleted": pointed(calls, root)}
    for ending, place in durable.items():
        synced = index(calls, "fsync", lambda call: call.path == str(root), after=place)
        gone = [
            number
            for number, call in enumerate(calls)
            if call.name == "rename"
            and ending in call.target
            and call.path != str(root / "iter_0000002")  # it makes room for the new one
        ]
        assert gone and min(gone) > synced


def test_a_step_has_lost_its_name_on_the_disk_before_its_files_go(root, saved):
    calls = calls_of_a_save(root, saved)
    for step in ("iter_0000001", "iter_0000002.superseded"):
        renamed = index(calls, "rename", lambda call, step=step: call.path == str(root / step))
        target = calls[renamed].target
        first = index(
            calls, "unlink", lambda call, target=target: call.path.startswith(target), after=renamed
        )
        assert index(calls, "fsync", lambda call: call.path == str(root), after=renamed) < first
        # what a kill leaves from here on does not look complete
        assert calls[first].path.endswith("manifest.json")


def test_a_save_is_over_when_the_pointer_is_on_the_disk(root, saved):
    """Also the first one in a directory, which has nothing to delete."""
    shutil.rmtree(root)
    root.mkdir()
    with recorded() as calls:
        saved.start(root, 0, [1])
    after = calls[pointed(calls, root) + 1 :]
    assert any(call.name == "fsync" and call.path == str(root) for call in after)
