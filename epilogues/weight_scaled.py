# D[m, n] = scale_b[n] * accum[m, n] + bias[n] + residual[m, n]
def weight_scaled(accum, scale_b, bias, residual):
    D = scale_b * accum + bias + residual
    return D
