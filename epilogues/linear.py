# D[m, n] = accum[m, n] + bias[n]
def linear(accum, bias):
    D = accum + bias
    return D
