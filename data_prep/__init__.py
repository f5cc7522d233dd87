"""From files to packed token shards: readers, tokenizer training, parallel tokenizing, packing."""
