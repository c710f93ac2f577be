# D[m, n] = scale_a[m] * (scale_b[n] * accum[m, n]) + bias[n]
def scaled(accum, scale_a, scale_b, bias):
    D = scale_a * (scale_b * accum) + bias
    return D
