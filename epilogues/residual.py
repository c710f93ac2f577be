# D[m, n] = accum[m, n] + bias[n] + residual[m, n]
def residual(accum, bias, residual):
    D = accum + bias + residual
    return D
