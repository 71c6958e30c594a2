"""Files: any tree as one safetensors file, adapters as a PEFT directory, and quantised weights of other libraries."""
