"""From files of records to batches of packed token rows.

    files.py      records of .jsonl, .json, .csv, .parquet and .txt files, one at a time
    records.py    what a record says: a chat, text with targets, a preference
    sandbox.py, spans.py    the tokenizer's own chat template, and the characters that the assistant writes
    tokenizer.py, words.py  the tokenizer's own configuration; byte-level BPE with a memory
    serve.py, workers.py    processes of bounded time and memory that do all of that
    store.py      tokens on disk, written once
    dataset.py    rows of the store by number, and the batch of a step
    show.py       rows as a person reads them

This file imports nothing, because the processes of serve.py have to start fast.
"""
