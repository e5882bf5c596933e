"""The disk is full, fails, or is gone: what was saved stays, and the words say what to do."""

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY, in_process, small_state

from txl import archive, checkpoint, saver, tracking, training


def test_disk_full_during_a_save(monkeypatch):
    """The words name the room, the old files stay, nothing is left beside; once there is room again a save succeeds."""
    monkeypatch.setattr(archive, "PAUSE", 0)
    writer = saver.Saver(Path("."), keep=2)
    writer.save(small_state(1), best=True)
    writer.wait()
    before = {name: Path(name).read_bytes() for name in os.listdir()}
    real = archive._Hashing.write
    for room in (0, 1, 3000):

        def full(self, data, room=room):
            if self.size + len(data) > room:
                self.error = self.error or OSError(errno.ENOSPC, "No space left on device")
                raise self.error
            return real(self, data)

        monkeypatch.setattr(archive._Hashing, "write", full)
        writer.save(small_state(2), best=True)
        with pytest.raises(
            OSError, match=r"^name: .*last.next.pt|best.next.pt cannot be written: it takes about 4,000 bytes"
        ):
            writer.wait()
        assert {name: Path(name).read_bytes() for name in os.listdir()} == before
    monkeypatch.setattr(archive._Hashing, "write", real)
    writer.save(small_state(3), best=True)
    writer.wait()
    assert archive.read(Path("last.pt"))["step"] == 3 and archive.read(Path("last.1.pt"))["step"] == 1


def test_an_error_of_the_writing_thread_stops_the_run_with_its_message(monkeypatch):
    monkeypatch.setattr(archive, "PAUSE", 0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "write_whole", full)
    outcome = in_process("train", *TINY)
    assert outcome.status == 1 and "Traceback" not in outcome.stderr
    assert re.search(r"^name: .*\.pt cannot be written: it takes about [\d,]+ bytes, .*No space", outcome.stderr, re.M)


def test_a_transient_error_of_a_sync_is_outlived(monkeypatch):
    monkeypatch.setattr(archive, "PAUSE", 0)
    real, failures = os.fsync, [1]

    def failing(descriptor):
        if failures:
            failures.pop()
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    archive.write(Path("a.pt"), small_state())
    assert archive.read(Path("a.pt"))["step"] == 1 and os.listdir() == ["a.pt"]
    failures.extend([1] * archive.ATTEMPTS)
    with pytest.raises(OSError, match=r"a\.pt cannot be written: .*Input/output error"):
        archive.write(Path("a.pt"), small_state(2))
    assert archive.read(Path("a.pt"))["step"] == 1 and os.listdir() == ["a.pt"]


def test_disk_full_for_the_log(capsys, monkeypatch):
    """Training goes on with one warning; the lines are kept and written once there is room."""
    metrics = tracking.Metrics(Path("metrics.jsonl"), step=0)
    metrics.log({"step": 1, "tokens": 1})
    real = metrics._file

    class Full:
        def __getattr__(self, name):
            return getattr(real, name)

        def write(self, data):
            return real.write(data[: len(data) // 2])

    metrics._file = Full()
    metrics.log({"step": 2, "tokens": 2})
    metrics.log({"step": 3, "tokens": 3})
    assert Path("metrics.jsonl").read_text() == '{"step": 1, "tokens": 1}\n'
    metrics._file = real
    metrics.log({"step": 4, "tokens": 4})
    metrics.close()
    assert [row["step"] for row in tracking.read_metrics(Path("metrics.jsonl"))] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("training goes on") == 1


def test_a_folder_that_vanishes_ends_the_run_in_a_line(monkeypatch):
    monkeypatch.setattr(archive, "PAUSE", 0)
    real = training.updates

    def vanishing(*arguments, **settings):
        for update in real(*arguments, **settings):
            if update.step == 2:
                shutil.rmtree("outputs")
            yield update

    monkeypatch.setattr(training, "updates", vanishing)
    outcome = in_process("train", *TINY)
    assert outcome.status == 1 and "Traceback" not in outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith("name: ") and "is gone" in outcome.stderr


def test_checkpoints_hold_weights_that_stand_in_two_places_once():
    shared = torch.zeros(1000)
    copy = saver.on_host({"a": shared, "b": shared, "c": [shared[:10]], "d": 3})
    assert copy["a"] is copy["b"] and copy["a"] is not shared
    assert copy["c"][0].untyped_storage().nbytes() == 40
    assert checkpoint.FORMAT.startswith("txl-")
