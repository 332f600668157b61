import torch

import hbnode


def test_mlp_appends_the_time_as_a_feature():
    net = hbnode.nets.MLP(3, [5], 2, time_dependent=True)
    t, h = torch.tensor(0.7), torch.randn(4, 6, 3)
    joined = torch.cat([h, torch.full((4, 6, 1), 0.7)], dim=-1)
    torch.testing.assert_close(net(t, h), net.layers(joined))


def test_mlp_concatenates_position_and_velocity():
    net = hbnode.nets.MLP(4, [5], 2)
    h, v = torch.randn(2, 7, 2)
    torch.testing.assert_close(net(h, v), net.layers(torch.cat([h, v], dim=-1)))


def test_conv_net_appends_the_time_as_a_channel_before_every_convolution():
    net = hbnode.nets.ConvNet(2, 5, 3)
    t, h = torch.tensor(0.7), torch.randn(4, 2, 6, 6)
    clock = torch.full((4, 1, 6, 6), 0.7)
    x = net.conv1(torch.cat([h, clock], 1)).relu()
    x = net.conv2(torch.cat([x, clock], 1)).relu()
    torch.testing.assert_close(net(t, h), net.conv3(torch.cat([x, clock], 1)))
    # without the time: plain convolutions
    net = hbnode.nets.ConvNet(2, 5, 3, time_dependent=False)
    torch.testing.assert_close(net(h), net.conv3(net.conv2(net.conv1(h).relu()).relu()))
