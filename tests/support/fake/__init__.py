"""The rooms behind tests/support/fake_engine.py: one stand-in for the programs of vLLM, SGLang and llama.cpp."""
