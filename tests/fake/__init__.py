"""The rooms behind tests/fake_engine.py: one stand-in for the programs of vLLM, SGLang and llama.cpp."""
