class LlamaCpp:
    kind = "llamacpp"
