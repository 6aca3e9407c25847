"""One model computed by several ranks: shares of each layer, stages of consecutive layers, replicas
of the whole.
"""
