"""The product of rows sorted by expert with weights of one byte: e4m3 on both sides, or int8 and e4m3 weights alone."""
