class VLLM:
    kind = "vllm"
