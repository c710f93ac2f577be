# D[m, n] = scale_a[m] * (scale_b[n] * (accum[m, n] - zero_point_a[m] * sum_b[n])) + bias[n], the difference in integers
def asymmetric(accum, scale_a, scale_b, bias, zero_point_a, sum_b):
    D = scale_a * (scale_b * (accum - zero_point_a * sum_b)) + bias
    return D
