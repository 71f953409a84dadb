"""Which layers a stage has, by hand, and the arithmetic that is told where they cannot be
divided."""

import itertools

import pytest

from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.stages import stages


def layers(parallel, num_layers):
    return [
        [
            range(stage.first_layer, stage.first_layer + stage.num_layers)
            for stage in stages(parallel, num_layers)
            if stage.rank == rank
        ]
        for rank in range(parallel.pipeline_model_parallel_size)
    ]


PP = "pipeline_model_parallel_size"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
VIRTUAL = "num_virtual_stages_per_pipeline_rank"
PER_STAGE = "num_layers_per_virtual_pipeline_stage"


@pytest.mark.parametrize(
    "fields, num_layers, expected",
    [
        ({}, 5, [[range(5)]]),
        ({PP: 2}, 8, [[range(4)], [range(4, 8)]]),
        ({PP: 2, VIRTUAL: 2}, 8, [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]),
        ({PP: 3, FIRST: 1}, 7, [[range(1)], [range(1, 4)], [range(4, 7)]]),
        ({PP: 2, FIRST: 2, VIRTUAL: 2}, 6, [[range(1), range(3, 4)], [range(1, 3), range(4, 6)]]),
    ],
)
def test_layers_are_dealt_out_in_the_order_of_the_model(fields, num_layers, expected):
    parallel = ParallelConfig(**fields)
    assert layers(parallel, num_layers) == expected
    dealt = stages(parallel, num_layers)
    ends = [0, *itertools.accumulate(stage.num_layers for stage in dealt)]
    assert [stage.first_layer for stage in dealt] == ends[:-1] and ends[-1] == num_layers
    assert [stage.number for stage in dealt] == [*range(len(dealt))] and {
        stage.count for stage in dealt
    } == {len(dealt)}
    assert [stage.number for stage in dealt if stage.is_first or stage.is_last] == sorted(
        {0, len(dealt) - 1}
    )


@pytest.mark.parametrize(
    "fields, num_layers, message",
    [
        ({PP: 3}, 8, r"--num-layers 8 is not divisible by .* \(3\)"),
        ({PP: 3, FIRST: 1}, 8, "leave 7 for the 2 other ranks of .* 3: give numbers"),
        ({PP: 2, FIRST: 3, LAST: 3}, 8, "leave 2 for the 0 other ranks"),
        ({PP: 4, LAST: 6}, 8, "--decoder-last.* 6 of --num-layers 8 leave 2 for the 3"),
        ({PP: 2, VIRTUAL: 3}, 8, "rank 0 holds 4 layers, which are not divisible by 3"),
        ({PP: 2, PER_STAGE: 3}, 8, "3 does not divide the 4 layers"),
        ({PP: 2, FIRST: 2, PER_STAGE: 1}, 6, "needs stages of equal length"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused_with_the_numbers(fields, num_layers, message):
    with pytest.raises(ValueError, match=message):
        stages(ParallelConfig(**fields), num_layers)


@pytest.mark.long  # megatron-core takes seconds to import
@pytest.mark.parametrize(
    "layout, size",
    [
        ("Et*3|(tt|)*3L", 5),
        ("Ettt|(tt|)*2,t|L", 5),
        ("E|t,t|(t|)*2|tL", 2),
        ("Et|tttttL", 2),
        ("E|(t*2|)*2t|L", 5),
    ],
)
def test_a_layout_is_cut_as_megatron_core_cuts_it(layout, size):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    expected = PipelineParallelLayerLayout(layout, size)
    number = sum(one.name == "decoder" for one in expected.flatten_layout)
    parallel = ParallelConfig(
        pipeline_model_parallel_size=size, pipeline_model_parallel_layout=layout
    )
    found = stages(parallel, number)
    assert len(found) == size * expected.virtual_pipeline_model_parallel_size
    for stage in found:
        kinds = [one.name for one in expected.layout[stage.rank][stage.number // size]]
        assert stage.num_layers == kinds.count("decoder")
        assert (stage.is_first, stage.is_last) == ("embedding" in kinds, "loss" in kinds)


@pytest.mark.parametrize(
    "layout, said",
    [
        ("Ettm|L", "multi-token prediction"),
        ("Etx|tL", "'x' is none of E, t, L"),
        ("Et*1000|L", "'0' is none of E, t, L, .* below 1000"),
        ("|Ett|L|", "needs one E, at its start, and one L, at its end"),
        ("Et|L", "has 1 layer .* not the 2 of --num-layers"),
        ("Et|t|L", "has 3 stages, no multiple of --pipeline-model-parallel-size 2"),
    ],
)
def test_a_wrong_layout_says_what_is_wrong(layout, said):
    parallel = ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout)
    with pytest.raises(ValueError, match=f"--pipeline-model-parallel-layout .*: .*{said}"):
        stages(parallel, 2)
