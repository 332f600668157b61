"""Published coefficients of the native methods. The tests check them against the order conditions."""

from __future__ import annotations

import math
from dataclasses import dataclass

Row = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Tableau:
    """The base class of tableaus, which hold the coefficients of methods. The tests check the stated orders.

    Attributes:
        order: order of the method.
        error_order: order of the embedded solution; None for methods without one, which need fixed steps.
        dense_order: order of the dense output of y or of the position h; the order for the momentum m is one less. None
            without dense output.
        dense_error_factor: largest ratio, at least 1, of the error of dense output to the error estimate of the step.
    """

    order: int
    error_order: int | None = None
    dense_order: int | None = None
    dense_error_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class NystromTableau(Tableau):
    r"""An embedded Runge-Kutta-Nystrom pair for :math:`u'' = g(u, s)` whose last stage is the first of the next step.

    With step size H and values :math:`g_i` of g at the stages :math:`u_i`, a step ends at u and u':

    .. math::
        u_i = u_0 + c_i H u'_0 + H^2 \sum_j a_{ij} g_j, \quad
        u = u_0 + H u'_0 + H^2 \sum_j b_j g_j, \quad u' = u'_0 + H \sum_j b'_j g_j

    Attributes:
        c: nodes of the stages, from 0 to 1.
        a: the coefficients a_ij, one row for each stage from the second one on; the last row is b without its last
            weight, which is 0.
        b_velocity: the weights b'.
        error: b minus the weights of the embedded solution.
        error_velocity: b' minus the weights of the embedded solution for u'.
    """

    c: Row
    a: tuple[Row, ...]
    b_velocity: Row
    error: Row
    error_velocity: Row

    @property
    def b(self) -> Row:
        """The weights b of the position."""
        return (*self.a[-1], 0.0)


@dataclass(frozen=True, kw_only=True)
class RungeKuttaTableau(Tableau):
    r"""An embedded Runge-Kutta pair for :math:`y' = f(t, y)` whose last stage is the first of the next step.

    Attributes:
        c: nodes of the stages, from 0 to 1.
        a: the Runge-Kutta matrix, one row for each stage from the second one on; the last row holds the weights b
            without the last weight, which is 0.
        error: b minus the weights of the embedded solution.
        dense: coefficients of the dense output :math:`y(\theta) = y_0 + \theta H \sum_i b_i(\theta) k_i` at the
            position θ in a step of size H, with stage values k_i and :math:`b_i(\theta) = \sum_k` ``dense[i][k]``
            :math:`\theta^k`.
    """

    c: Row
    a: tuple[Row, ...]
    error: Row
    dense: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class RosenbrockTableau(Tableau):
    r"""An embedded Rosenbrock pair for :math:`y' = f(t, y)`, in the form without matrix-vector products.

    Let H be the step size, and :math:`J = \partial f / \partial y` and :math:`f_t = \partial f / \partial t` the
    derivatives at the start :math:`(t_0, y_0)` of the step. The stages :math:`u_i` and the new state y are

    .. math::
        (I / (H g) - J) u_i = f(t_0 + c_i H, y_0 + \sum_{j<i} a_{ij} u_j) + \sum_{j<i} C_{ij} u_j / H + d_i H f_t,
        \quad y = y_0 + \sum_j b_j u_j.

    The embedded solution is y without its last stage.

    Attributes:
        diagonal: the coefficient g.
        c: nodes of the stages.
        a: the coefficients a_ij, one row for each stage from the second one on; the last row holds the weights b.
        C: the coefficients C_ij, one row for each stage from the second one on.
        d: the coefficients d_i of :math:`f_t`.
        dense: coefficients of the dense output :math:`y(\theta) = (1 - \theta) y_0 + \theta y + \theta (1 - \theta)
            \sum_{ik} \theta^k` ``dense[i][k]`` :math:`u_i` at the position θ in a step, from 0 to 1.
    """

    diagonal: float
    c: Row
    a: tuple[Row, ...]
    C: tuple[Row, ...]
    d: Row
    dense: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class ExponentialTableau(Tableau):
    r"""An embedded pair of the class :class:`~hbnode.solve.methods.Exponential`, for :math:`h'' + \gamma h' = f(h, t)`.

    Attributes:
        stiff_order: order of the method as the damping γ tends to infinity; ``order`` is the order for step sizes below
            1/γ.
        c: nodes of the stages, from 0 to 1.
        corrections: the weights κ_ij, one row for each stage i from the second one on, for the stages j between the
            first one and i.
        left_out: index of the value of f that the embedded solution does not use.
    """

    stiff_order: int
    c: Row
    corrections: tuple[Row, ...]
    left_out: int


@dataclass(frozen=True, kw_only=True)
class SplittingTableau(Tableau):
    """The coefficients of a symmetric splitting method.

    Attributes:
        drifts: the times of the drifts (updates of the position h), as fractions of the step.
        kicks: the times of the kicks (updates of the momentum m), as fractions of the step. There is one more drift
            than kicks.
    """

    drifts: Row
    kicks: Row


def _row(text: str) -> Row:
    """Convert a string of numbers and fractions, separated by spaces, to a tuple of floats."""
    pairs = (number.partition("/") for number in text.split())
    return tuple(float(above) / float(below or 1) for above, _, below in pairs)


def _rows(text: str) -> tuple[Row, ...]:
    return tuple(map(_row, text.strip().splitlines()))


def _minus(x: Row, y: Row) -> Row:
    return tuple(a - b for a, b in zip(x, y, strict=True))


# RKN4(3)4FM of Dormand, El-Mikkawy and Prince, Families of Runge-Kutta-Nystrom formulae, IMA J. Numer. Anal. 7 (1987)
# 235-250.
RKN4 = NystromTableau(
    order=4,
    error_order=3,
    dense_order=4,
    c=(0, 1 / 4, 7 / 10, 1),
    a=((1 / 32,), (7 / 1000, 119 / 500), (1 / 14, 8 / 27, 25 / 189)),
    b_velocity=(1 / 14, 32 / 81, 250 / 567, 5 / 54),
    error=_minus((1 / 14, 8 / 27, 25 / 189, 0), (-7 / 150, 67 / 150, 3 / 20, -1 / 20)),
    error_velocity=_minus((1 / 14, 32 / 81, 250 / 567, 5 / 54), (13 / 21, -20 / 27, 275 / 189, -1 / 3)),
)

# RKN6(4)6FD of Dormand and Prince, Runge-Kutta-Nystrom triples, Comput. Math. Appl. 13 (1987) 937-949.
_R = math.sqrt(8581)
_RKN6_B = (329 / 4212, 0, (84119543 + 366727 * _R) / 409622616, (84119543 - 366727 * _R) / 409622616, 200 / 17901, 0)
_RKN6_B_VELOCITY = (
    329 / 4212, 0, (389225579 + 96856 * _R) / 1024056540, (389225579 - 96856 * _R) / 1024056540, 2000 / 17901, 1 / 20,
)  # fmt: skip
RKN6 = NystromTableau(
    order=6,
    error_order=4,
    dense_order=6,
    c=(0, (209 - _R) / 900, (209 - _R) / 450, (209 + _R) / 450, 9 / 10, 1),
    a=(
        ((26131 - 209 * _R) / 810000,),
        ((26131 - 209 * _R) / 607500, (26131 - 209 * _R) / 303750),
        (
            (980403512254 + 7781688431 * _R) / 11694469921875, -(1262884486208 + 15385481287 * _R) / 11694469921875,
            (7166233891441 + 78694563299 * _R) / 46777879687500,
        ),
        (
            -9 * (329260 + 3181 * _R) / 27040000, 27 * (35129 + 3331 * _R) / 13520000,
            -27 * (554358343 + 31040327 * _R) / 464060480000, 153 * (8555257 - 67973 * _R) / 2745920000,
        ),
        _RKN6_B[:5],
    ),
    b_velocity=_RKN6_B_VELOCITY,
    error=_minus(_RKN6_B, ((2701 + 23 * _R) / 4563, -(9829 + 131 * _R) / 9126, 5 * (1798 + 17 * _R) / 9126, 0, 0, 0)),
    error_velocity=_minus(
        _RKN6_B_VELOCITY,
        (
            115 / 2106, 0, (84119543 + 366727 * _R) / 256014135, (84119543 - 366727 * _R) / 256014135,
            6950 / 17901, -1 / 10,
        ),
    ),
)  # fmt: skip

# RKN8(6)9FM of Dormand, El-Mikkawy and Prince, High-order embedded Runge-Kutta-Nystrom formulae, IMA J. Numer. Anal. 7
# (1987) 423-430.
_RKN8_B = "223/7938 0 1175/8064 925/6048 41/448 925/14112 1175/72576 0"
_RKN8_B_VELOCITY = _row("223/7938 0 5875/36288 4625/21168 41/224 4625/21168 5875/36288 223/7938 0")
_RKN8_EMBEDDED = _row("""
    7987313/109941300 0 1610737/44674560 10023263/33505920 -497221/12409600 10023263/78180480 1610737/402071040 0 0""")
_RKN8_EMBEDDED_VELOCITY = _row("""
    7987313/109941300 0 1610737/40207104 10023263/23454144 -497221/6204800 10023263/23454144 1610737/40207104
    -4251941/54970650 3/20""")
RKN8 = NystromTableau(
    order=8,
    error_order=6,
    dense_order=6,
    c=_row("0 1/20 1/10 3/10 1/2 7/10 9/10 1 1"),
    a=_rows(f"""
        1/800
        1/600 1/300
        9/200 -9/100 9/100
        -66701/197352 28325/32892 -2665/5482 2170/24669
        227015747/304251000 -54897451/30425100 12942349/10141700 -9499/304251 539/9250
        -1131891597/901789000 41964921/12882700 -6663147/3220675 270954/644135 -108/5875 114/1645
        13836959/3667458 -17731450/1833729 1063919505/156478208 -33213845/39119552 13335/28544 -705/14272 1645/57088
        {_RKN8_B}"""),
    b_velocity=_RKN8_B_VELOCITY,
    error=_minus(_row(_RKN8_B + " 0"), _RKN8_EMBEDDED),
    error_velocity=_minus(_RKN8_B_VELOCITY, _RKN8_EMBEDDED_VELOCITY),
)

# Tsitouras, Runge-Kutta pairs of order 5(4) satisfying only the first column simplifying assumption, Comput. Math.
# Appl. 62 (2011) 770-775, with its interpolant of order 4.
TSIT5 = RungeKuttaTableau(
    order=5,
    error_order=4,
    dense_order=4,
    dense_error_factor=4.0,
    c=_row("0 0.161 0.327 0.9 0.9800255409045097 1 1"),
    a=_rows("""
        0.161
        -0.008480655492356989 0.335480655492357
        2.8971530571054935 -6.359448489975075 4.3622954328695815
        5.325864828439257 -11.748883564062828 7.4955393428898365 -0.09249506636175525
        5.86145544294642 -12.92096931784711 8.159367898576159 -0.071584973281401 -0.028269050394068383
        0.09646076681806523 0.01 0.4798896504144996 1.379008574103742 -3.290069515436081 2.324710524099774"""),
    error=_row("""
        0.00178001105222577714 0.0008164344596567469 -0.007880878010261995 0.1447110071732629
        -0.5823571654525552 0.45808210592918697 -1/66"""),
    dense=_rows("""
        0.9999999999999999 -2.763706197274826 2.9132554618219126 -1.0530884977290216
        0 0.13169999999999998 -0.2234 0.1017
        0 3.930296236894751 -5.941033872131505 2.490627285651253
        0 -12.411077166933676 30.33818863028232 -16.548102889244902
        0 37.50931341651104 -88.1789048947664 47.37952196281928
        0 -27.896526289197286 65.09189467479368 -34.87065786149661
        0 1.5 -4 2.5"""),
)

# Steinebach, Construction of Rosenbrock-Wanner method Rodas5P and numerical benchmarks within the Julia Differential
# Equations package, BIT Numer. Math. 63 (2023) 27; digits as in OrdinaryDiffEq.jl (rosenbrock_tableaus.jl).
_LAST = "-7.502846399306121 2.561846144803919 -11.627539656261098 -0.18268767659942256 0.030198172008377946"
RODAS5P = RosenbrockTableau(
    order=5,
    error_order=4,
    dense_order=4,
    diagonal=0.21193756319429014,
    c=_row("0 0.6358126895828704 0.4095798393397535 0.9769306725060716 0.4288403609558664 1 1 1"),
    a=_rows(f"""
        3
        2.849394379747939 0.45842242204463923
        -6.954028509809101 2.489845061869568 -10.358996098473584
        2.8029986275628964 0.5072464736228206 -0.3988312541770524 -0.04721187230404641
        {_LAST}
        {_LAST} 1
        {_LAST} 1 1
        {_LAST} 1 1 1"""),
    C=(
        *_rows("""
            -14.155112264123755
            -17.97296035885952 -2.859693295451294
            147.12150275711716 -1.41221402718213 71.68940251302358
            165.43517024871676 -0.4592823456491126 42.90938336958603 -5.961986721573306
            24.854864614690072 -3.0009227002832186 47.4931110020768 5.5814197821558125 -0.6610691825249471"""),
        _row("""
            30.91273214028599 -3.1208243349937974 77.79954646070892 34.28646028294783 -19.097331116725623
            -28.087943162872662"""),
        _row("""
            37.80277123390563 -3.2571969029072276 112.26918849496327 66.9347231244047 -40.06618937091002
            -54.66780262877968 -9.48861652309627"""),
    ),
    d=_row("0.21193756319429014 -0.42387512638858027 -0.3384627126235924 1.8046452872882734 2.325825639765069 0 0 0"),
    dense=_rows("""
        25.948786856663858 -9.91568850695171 11.419903575922262
        -2.5579724845846235 -0.9689944594115154 2.8879645146136994
        10.433815404888879 3.0438037242978453 72.92137995996029
        -2.3679251022685204 -24.495224566215796 80.12511834622643
        0.524948541321073 20.176138334709044 -52.072871366152654
        1.1241088310450404 15.98066361424651 -59.78993625266729
        0.4272876194431874 -6.789040303419874 -0.15582684282751913
        -0.17202221070155493 -6.710236069923372 4.883087185713722"""),
)

# Blanes and Moan, Practical symplectic partitioned Runge-Kutta and Runge-Kutta-Nystrom methods, J. Comput. Appl. Math.
# 142 (2002) 313-330: the method S6 of order 4, for any splitting into two flows; here they are drifts and kicks.
_A1, _A2, _A3 = 0.0792036964311957, 0.353172906049774, -0.0420650803577195
_B1, _B2 = 0.209515106613362, -0.143851773179818
BLANES_MOAN4 = SplittingTableau(
    order=4,
    drifts=(_A1, _A2, _A3, 1 - 2 * (_A1 + _A2 + _A3), _A3, _A2, _A1),
    kicks=(_B1, _B2, 0.5 - _B1 - _B2, 0.5 - _B1 - _B2, _B2, _B1),
)
STRANG = SplittingTableau(order=2, drifts=(0.5, 0.5), kicks=(1.0,))

# This method was derived for hbnode. It tends to published methods in two limits. Without damping it is the method of
# order 5 of Nystrom, Ueber die numerische Integration von Differentialgleichungen, Acta Soc. Sci. Fennicae 50 (1925),
# see Hairer, Norsett and Wanner, Solving ODEs I, II.14. With strong damping it is the method of order 4, with the same
# nodes, of Kutta, Beitrag zur naeherungsweisen Integration totaler Differentialgleichungen, Z. Math. Phys. 46 (1901)
# 435-453. Both have the weights w = (14, 125, 162, 35)/336 for m. The defects d of the stages cancel:
# w_2 (1 - c_2) d_2 + w_3 (1 - c_3) d_3 = 0 and w_2 d_2 + w_3 d_3 + w_4 d_4 = 0.
EXPONENTIAL = ExponentialTableau(
    order=5,
    stiff_order=4,
    error_order=3,
    dense_order=5,
    c=(0, 1 / 5, 2 / 3, 1),
    corrections=((), (50 / 27,), (25 / 7, 162 / 35)),
    left_out=1,
)
