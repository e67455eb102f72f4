"""CUDA graphs: steps of decodes, padded to buckets, recorded at boot and replayed."""
