"""The test-suite; its folders mirror megatron_lite."""
