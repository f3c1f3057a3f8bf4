"""The paged KV cache: `blocks` says who owns what, `cache` holds the tensors."""
