"""Files: any tree as one safetensors file, and adapters as a PEFT directory."""
