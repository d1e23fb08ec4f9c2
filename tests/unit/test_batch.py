"""How one Lightning batch becomes the microbatches of a schedule."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from lightning_mcore.batch import (
    batch_size,
    plan_evaluation,
    plan_training,
    split_batch,
    tensors_of,
)
from lightning_mcore.errors import ConfigurationError

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Example:
    x: torch.Tensor
    names: list
    scale: float = 2.0
    derived: int = field(default=0, init=False)


def rows(samples, width=2):
    return torch.arange(samples * width).reshape(samples, width)


def plan(samples, **options):
    settings = {"micro_batch_size": None, "pp": 1, "interleaved": False, **options}
    return plan_training({"x": rows(samples)}, **settings)


def sizes_of(run):
    return [len(microbatch.data["x"]) for microbatch in run.microbatches]


class TestBatchSize:
    @pytest.mark.parametrize(
        ("batch", "size"),
        [
            (rows(3), 3),
            ({"scalar": torch.tensor(1.0), "x": rows(4)}, 4),
            (["a", (torch.tensor(2), rows(5))], 5),
            (Example(rows(6), ["n"] * 6), 6),
            ("no tensor", 1),
            ({"n": 3, "names": ["a", "b"]}, 1),
            (torch.zeros(0, 2), 0),
        ],
    )
    def test_is_dim_0_of_the_first_tensor_with_dims(self, batch, size):
        assert batch_size(batch) == size

    def test_finds_tensors_in_order(self):
        a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
        found = list(tensors_of({"a": a, "in": [Pair(b, "text"), Example(c, [d])], "n": None}))
        assert [float(t) for t in found] == [0.0, 1.0, 2.0, 3.0]


class TestSplit:
    def test_cuts_along_dim_0_without_copying(self):
        batch = rows(5)
        pieces = split_batch(batch, 2)
        assert [len(p) for p in pieces] == [2, 2, 1]
        assert torch.equal(torch.cat(pieces), batch)
        assert pieces[1].data_ptr() == batch[2:].data_ptr()

    def test_a_batch_that_fits_is_handed_on_itself(self):
        batch = {"x": rows(3)}
        assert split_batch(batch, 3)[0] is batch
        assert split_batch(batch, 4)[0] is batch

    @pytest.mark.parametrize("kind", [dict, OrderedDict])
    def test_mappings_keep_their_type(self, kind):
        pieces = split_batch(kind(x=rows(4), label=torch.arange(4)), 2)
        assert [type(p) for p in pieces] == [kind, kind]
        assert pieces[1]["label"].tolist() == [2, 3]

    def test_a_mapping_that_is_made_otherwise(self):
        batch = defaultdict(list, x=rows(4), names=["a", "b", "c", "d"])
        first, second = split_batch(batch, 2)
        assert second["names"] == ["c", "d"]
        assert torch.equal(first["x"], rows(4)[:2])

    @pytest.mark.parametrize("kind", [tuple, list])
    def test_sequences_keep_their_type(self, kind):
        pieces = split_batch(kind([rows(4), kind([rows(4), rows(4, 3)])]), 2)
        assert [type(p) for p in pieces] == [kind, kind]
        assert type(pieces[0][1]) is kind
        assert pieces[1][1][1].tolist() == rows(4, 3)[2:].tolist()

    def test_named_tuples_and_dataclasses_are_rebuilt(self):
        pair, example = split_batch(
            [Pair(rows(4), rows(4)), Example(rows(4), list("abcd"), 0.5)], 3
        )[1]
        assert isinstance(pair, Pair)
        assert pair.y.tolist() == [[6, 7]]
        assert isinstance(example, Example)
        assert (example.names, example.scale) == (["d"], 0.5)

    def test_one_entry_per_sample_is_cut_and_all_else_is_shared(self):
        tag = object()
        first, second = split_batch(
            {
                "x": rows(4),
                "texts": ["a", "b", "c", "d"],
                "classes": ["cat", "dog"],
                "word": "four",
                "temperature": torch.tensor(0.5),
                "tag": tag,
                "none": None,
            },
            2,
        )
        assert (first["texts"], second["texts"]) == (["a", "b"], ["c", "d"])
        assert second["classes"] == ["cat", "dog"]
        assert (second["word"], second["none"]) == ("four", None)
        assert second["temperature"] == 0.5
        assert second["tag"] is tag

    def test_tensors_that_disagree_are_refused_with_a_way_out(self):
        with pytest.raises(ConfigurationError, match=r"\(3, 2\).*4 samples.*`split_batch\(batch"):
            split_batch({"x": rows(4), "boxes": rows(3)}, 2)


class TestPlanTraining:
    def test_without_pipelining_the_batch_is_whole(self):
        assert sizes_of(plan(6)) == [6]

    def test_with_pipelining_a_microbatch_is_one_sample(self):
        run = plan(3, pp=2)
        assert sizes_of(run) == [1, 1, 1]
        assert run.micro_batch_size == 1
        assert not any(m.is_filler for m in run.microbatches)

    def test_the_users_size_counts(self):
        assert sizes_of(plan(6, micro_batch_size=2)) == [2, 2, 2]
        assert sizes_of(plan(8, micro_batch_size=4, pp=2, interleaved=True)) == [4, 4]

    def test_what_does_not_divide_is_refused_with_both_neighbours(self):
        message = r"batch of 10 samples.*`micro_batch_size` \(4\).*batch size of 8 or 12"
        with pytest.raises(ConfigurationError, match=message):
            plan(10, micro_batch_size=4)

    def test_a_batch_smaller_than_a_microbatch_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"batch of 3.*batch size of 4, or a"):
            plan(3, micro_batch_size=4)

    def test_interleaving_needs_multiples_of_pp(self):
        message = r"\(3 = batch of 3 samples / `micro_batch_size` 1\).*`pp` \(2\).*batch size of 4"
        with pytest.raises(ConfigurationError, match=message):
            plan(3, pp=2, interleaved=True)
        assert sizes_of(plan(3, pp=2)) == [1, 1, 1]

    def test_it_names_a_micro_batch_size_that_would_do(self):
        with pytest.raises(ConfigurationError, match=r"or `micro_batch_size=2`\."):
            plan(4, micro_batch_size=4, pp=2, interleaved=True)

    @pytest.mark.parametrize(
        ("samples", "size", "pp", "expected"),
        [(3, 2, 1, [1, 1, 1]), (6, 4, 1, [3, 3]), (6, 4, 2, [3, 3]), (2, 4, 2, [1, 1])],
    )
    def test_the_short_last_batch_is_cut_smaller(self, samples, size, pp, expected):
        run = plan(samples, micro_batch_size=size, pp=pp, interleaved=pp > 1, regular_batch_size=8)
        assert sizes_of(run) == expected

    def test_a_short_last_batch_that_cannot_be_interleaved(self):
        with pytest.raises(ConfigurationError, match=r"last batch.*3 samples.*drop_last=True"):
            plan(3, micro_batch_size=2, pp=2, interleaved=True, regular_batch_size=4)

    def test_only_a_shorter_batch_is_a_last_one(self):
        with pytest.raises(ConfigurationError, match=r"`micro_batch_size` \(2\)"):
            plan(5, micro_batch_size=2, regular_batch_size=4)


class TestPlanEvaluation:
    def runs(self, samples, **options):
        settings = {"micro_batch_size": None, "pp": 1, "interleaved": False, **options}
        return plan_evaluation({"x": rows(samples)}, **settings)

    @pytest.mark.parametrize(
        ("samples", "options", "expected"),
        [
            (5, {}, [[5]]),
            (5, {"micro_batch_size": 2}, [[2, 2], [1]]),
            (1, {"micro_batch_size": 2}, [[1]]),
            (3, {"pp": 2}, [[1, 1, 1]]),
            (5, {"micro_batch_size": 2, "pp": 2}, [[2, 2], [1]]),
            (4, {"micro_batch_size": 2, "pp": 2, "interleaved": True}, [[2, 2]]),
            (3, {"pp": 2, "interleaved": True}, [[1, 1, 1, 1]]),
            (5, {"micro_batch_size": 2, "pp": 4, "interleaved": True}, [[2] * 4, [1] * 4]),
        ],
    )
    def test_any_size_is_cut(self, samples, options, expected):
        assert [sizes_of(run) for run in self.runs(samples, **options)] == expected

    def test_every_sample_counts_once_and_fillers_come_last(self):
        runs = self.runs(7, micro_batch_size=2, pp=4, interleaved=True)
        real = [m for run in runs for m in run.microbatches if not m.is_filler]
        assert torch.equal(torch.cat([m.data["x"] for m in real]), rows(7))
        for run in runs:
            flags = [m.is_filler for m in run.microbatches]
            assert flags == sorted(flags)
            assert len(flags) % 4 == 0

    def test_an_empty_batch_is_one_empty_microbatch(self):
        assert [sizes_of(run) for run in self.runs(0)] == [[0]]


class Opaque:
    """A batch that only its module's hook can cut."""

    def __init__(self, values):
        self.values = values


def by_twos(batch, size):
    return [rows(len(batch.values))[i : i + size] for i in range(0, len(batch.values), size)]


class TestHook:
    def settings(self, **changes):
        return {"micro_batch_size": 2, "pp": 2, "interleaved": True, "split": by_twos, **changes}

    def test_cuts_batches_that_this_module_cannot(self):
        run = plan_training(Opaque(range(8)), **self.settings())
        assert [m.size for m in run.microbatches] == [2] * 4
        assert run.microbatches[3].data.tolist() == rows(8)[6:].tolist()

    def test_is_asked_for_the_users_size(self):
        asked = []

        def note(batch, size):
            asked.append(size)
            return [rows(1)] * 2

        plan_training(Opaque(range(2)), **self.settings(split=note))
        plan_training(Opaque(range(2)), **self.settings(split=note, micro_batch_size=None))
        plan_evaluation(Opaque(range(2)), **self.settings(split=note, micro_batch_size=3))
        assert asked == [2, 1, 3]

    def test_is_not_asked_where_the_batch_stays_whole(self):
        batch = Opaque(range(8))
        run = plan_training(batch, **self.settings(pp=1, micro_batch_size=None, interleaved=False))
        assert [m.data for m in run.microbatches] == [batch]

    def test_its_number_of_microbatches_is_checked(self):
        with pytest.raises(ConfigurationError, match=r"`split_batch` hook returned 3.*return 4"):
            plan_training(Opaque(range(6)), **self.settings())

    def test_its_microbatches_must_be_equal_in_training(self):
        with pytest.raises(ConfigurationError, match=r"of one size.*\[2, 2, 2, 1\] samples"):
            plan_training(Opaque(range(7)), **self.settings())
        with pytest.raises(ConfigurationError, match="of one size"):
            plan_training(Opaque([]), **self.settings())

    def test_evaluation_takes_pieces_of_any_size(self):
        runs = plan_evaluation(Opaque(range(7)), **self.settings())
        assert [[m.size for m in run.microbatches] for run in runs] == [[2] * 4, [1] * 2]
        assert [[m.is_filler for m in run.microbatches] for run in runs] == [
            [False, False, False, True],
            [False, True],
        ]


class TestGroupsOfMicrobatches:
    """``microbatch_group_size_per_vp_stage`` and the number of microbatches."""

    def plan(self, samples, group_size, pp=2):
        return plan(samples, micro_batch_size=1, pp=pp, interleaved=True, group_size=group_size)

    @pytest.mark.parametrize(("samples", "group_size"), [(8, 2), (8, 4), (8, 8), (8, 3), (6, 4)])
    def test_fit(self, samples, group_size):
        assert len(self.plan(samples, group_size).microbatches) == samples

    @pytest.mark.parametrize(
        ("samples", "group_size", "message"),
        [
            (4, 6, r"`microbatch_group_size_per_vp_stage` \(6\) must be at most .*\(4\)"),
            (4, 3, r"`num_microbatches` \(4\) must leave nothing, or at least `pp` \(2\)"),
        ],
    )
    def test_are_refused_with_the_numbers(self, samples, group_size, message):
        with pytest.raises(ConfigurationError, match=message):
            self.plan(samples, group_size)

    def test_without_groups_nothing_is_asked(self):
        assert len(plan(4, micro_batch_size=1, pp=1, group_size=None).microbatches) == 4
