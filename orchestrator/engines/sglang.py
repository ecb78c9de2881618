class SGLang:
    kind = "sglang"
