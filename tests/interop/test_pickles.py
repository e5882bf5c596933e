"""Strangers' pickles are read as data: what they hold comes out, what they would do does not happen."""

import collections
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from theirs import Corpus, Unheard, Vocab, authors_file, save

from txl.interop import pickles
from txl.interop.pickles import Inert, Unreadable

BEGUN = pickle.PROTO + b"\x02"


class Doing:
    """Pickled as a call of something."""

    def __init__(self, call, *arguments):
        self.does = call, arguments

    def __reduce__(self):
        return self.does


@pytest.mark.parametrize("legacy", [False, True])
def test_objects_become_their_attributes_and_tensors_stay_shared(tmp_path, legacy):
    table = torch.randn(5, 4)
    content = {
        "corpus": Corpus(Vocab(["<eos>", "a"])),
        "table": table,
        "again": table,
        "row": table[2, 1:],
        "turned": table.T,
        "half": torch.randn(3).half(),
        "ordered": collections.OrderedDict(b=1, a=(2.5, None, "ü", b"\xff", {3})),
        "size": table.size(),
    }
    read = pickles.read(save(content, tmp_path / "file.pt", legacy))
    corpus, vocab = read["corpus"], read["corpus"].get("vocab")
    assert pickles.is_a(corpus, "Corpus") and pickles.is_a(vocab, "Vocab") and isinstance(vocab, Inert)
    assert vocab.get("idx2sym") == ["<eos>", "a"] and vocab.get("counter") == {"<eos>": 1, "a": 1}
    assert torch.equal(corpus.get("train"), torch.arange(1000))
    for name in ("table", "row", "turned", "half"):
        assert torch.equal(read[name], content[name]) and read[name].dtype == content[name].dtype
    assert read["again"].data_ptr() == read["table"].data_ptr()
    assert read["row"].data_ptr() == read["table"].data_ptr() + 9 * 4
    assert read["ordered"] == content["ordered"] and read["size"] == (5, 4)


@pytest.mark.parametrize("shift", range(4))
def test_an_archive_that_was_packed_again_has_the_same_tensors_shared_as_before(tmp_path, shift):
    """Another program aligns nothing."""
    table = torch.randn(5, 4)
    save({"one": table, "two": table[1:]}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as old, zipfile.ZipFile(tmp_path / "again.pt", "w") as new:
        for name in old.namelist():
            new.writestr("x" * shift + name, old.read(name))
    read = pickles.read(tmp_path / "again.pt")
    assert torch.equal(read["two"], table[1:])
    assert read["two"].data_ptr() == read["one"].data_ptr() + 16


def deeds(written: Path):
    """Pickles that write a file, or would do worse, and what they name."""
    text = f"open({str(written)!r}, 'w').close()"
    return {
        "a shell": (Doing(os.system, f"touch {written}"), "posix.system"),
        "eval": (Doing(eval, f"__import__('os').system('touch {written}')"), "builtin"),
        "exec": (Doing(exec, text), "builtin"),
        "open": (Doing(open, str(written), "w"), "open"),
        "a copy": (Doing(shutil.copy, __file__, str(written)), "shutil.copy"),
        "torch.load": (Doing(torch.load, str(written)), "torch.serialization.load"),
        "getattr": (Doing(getattr, [], "append"), "getattr"),
    }


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle", "protocol 4"])
@pytest.mark.parametrize("deed", deeds(Path("written")))
def test_a_pickle_that_would_act_is_refused_by_the_name_it_calls(tmp_path, deed, form):
    written = tmp_path / "written"
    value, name = deeds(written)[deed]
    content = {"model_state": {}, "hidden": [value]}
    path = tmp_path / "file.pt"
    if form in ("zip", "legacy"):
        save(content, path, form == "legacy")
    else:
        path.write_bytes(pickle.dumps(content, protocol=2 if form == "pickle" else 4))
    with pytest.raises(Unreadable, match=rf"it names '[\w.]*{name}.*refused") as refusal:
        pickles.read(path)
    assert "nothing in it was run" in str(refusal.value)
    assert not written.exists()


@pytest.mark.parametrize("deed", ["a shell", "eval", "exec", "open", "a copy"])
def test_such_a_pickle_does_act_where_python_loads_it(tmp_path, deed):
    value, _ = deeds(tmp_path / "written")[deed]
    pickle.loads(pickle.dumps(value))
    assert (tmp_path / "written").exists()


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (BEGUN + b"(S'touch written'\nios\nsystem\n.", "os.system"),  # the operation INST
        (pickle.PROTO + b"\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R.", "os.system"),  # STACK_GLOBAL
        (BEGUN + b"ccollections\nOrderedDict.__init__\n.", "collections.OrderedDict.__init__"),
        (pickle.PROTO + b"\x04\x8c\x0bcollections\x8c\x19OrderedDict.fromkeys.call\x93.", "OrderedDict.fromkeys.call"),
        (BEGUN + b"ctorch._utils\n_rebuild_device_tensor_from_numpy\n.", "_rebuild_device_tensor"),
        (BEGUN + b"cmem_transformer\nos\n.", "mem_transformer.os"),
        (BEGUN + b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.", "bytearray"),
        (BEGUN + b"cos\n\x1b[2Jred\n.", r"os.\\x1b[2Jred"),
    ],
)
def test_names_are_compared_whole_and_shown_without_their_control_characters(tmp_path, program, named):
    path = tmp_path / "file.pkl"
    path.write_bytes(program)
    with pytest.raises(Unreadable, match="refused") as refusal:
        pickles.read(path)
    assert named.replace("\\\\", "\\") in str(refusal.value)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (BEGUN + b"Nr" + struct.pack("<I", 2**31 - 1) + b".", "numbers its values beyond their count"),
        (BEGUN + b"})" + b"\x85" * 10**6 + b"K\x01s.", "more than 50000 tuples"),
        (BEGUN + b"K\x01ccollections\nOrderedDict\nq\x00b.", "damaged"),
        (BEGUN + b"(X\x04\x00\x00\x00elseK\x01tQ.", "where a tensor's numbers should be"),
    ],
)
def test_a_pickle_that_would_end_python_itself_is_told(tmp_path, program, message):
    path = tmp_path / "file.pkl"
    path.write_bytes(program)
    with pytest.raises(Unreadable, match=message):
        pickles.read(path)


@pytest.mark.parametrize(
    "size, stride, offset", [((6,), (1,), 0), ((3,), (1,), 3), ((2, 2), (4, 1), 0), ((9,), (0,), 0)]
)
def test_a_tensor_does_not_reach_beyond_its_numbers(tmp_path, size, stride, offset):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have us use another kind, which it does not save
        storage = torch.arange(5.0).storage()
    call = torch._utils._rebuild_tensor_v2
    good = Doing(call, storage, 1, (2, 2), (2, 1), False, collections.OrderedDict())
    assert pickles.read(save([good], tmp_path / "good.pt"))[0].tolist() == [[1, 2], [3, 4]]
    bad = Doing(call, storage, offset, size, stride, False, collections.OrderedDict())
    with pytest.raises(Unreadable, match="larger than its numbers"):
        pickles.read(save([bad], tmp_path / "bad.pt"))
    with pytest.raises(Unreadable, match="not understood"):
        pickles.read(save([Doing(call, storage, -1, (2,), (1,), False)], tmp_path / "before.pt"))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_cut_anywhere_is_told_as_damaged(tmp_path, legacy):
    whole = authors_file(tmp_path, legacy=legacy).read_bytes()
    cut = tmp_path / "cut.pt"
    for share in [0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.99, 0.9999]:
        cut.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(Unreadable):
            pickles.read(cut)


def changed_archive(tmp_path, **how):
    save({"a": torch.zeros(3)}, tmp_path / "whole.pt")
    with (
        zipfile.ZipFile(tmp_path / "whole.pt") as old,
        zipfile.ZipFile(tmp_path / "file.pt", "w", how.get("packed", zipfile.ZIP_STORED)) as new,
    ):
        for name in old.namelist():
            if not name.endswith(how.get("without", "/nothing")):
                new.writestr(name, how["byteorder"] if "byteorder" in how and "byteorder" in name else old.read(name))
    return tmp_path / "file.pt"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"packed": zipfile.ZIP_DEFLATED}, "not one of torch.save"),
        ({"without": "data.pkl"}, "not one of torch.save"),
        ({"without": "data/0"}, "damaged"),
        ({"byteorder": b"big"}, "big-endian"),
    ],
)
def test_an_archive_of_another_kind_is_told(tmp_path, how, message):
    with pytest.raises(Unreadable, match=message):
        pickles.read(changed_archive(tmp_path, **how))


@pytest.mark.parametrize("content", [b"", b"hello\nworld\n", b"PK\x03\x04", b"\x80", b"\x80\x02.", b"\x89PNG\r\n"])
def test_other_files_are_told(tmp_path, content):
    path = tmp_path / "file.pt"
    path.write_bytes(content)
    with pytest.raises(Unreadable):
        pickles.read(path)


def test_a_class_of_no_table_is_told(tmp_path):
    with pytest.raises(Unreadable, match=r"'surprise\.Unheard'"):
        pickles.read(save(Unheard(), tmp_path / "file.pt"))
