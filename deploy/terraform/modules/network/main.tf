# One VPC. Machines live in private subnets and reach AWS through one NAT gateway (S3 through a free endpoint), or,
# without the gateway, in public subnets whose security groups admit no connection from outside.

locals {
  zones = { for i, zone in var.availability_zones : zone => i }
}

resource "aws_vpc" "this" {
  #checkov:skip=CKV2_AWS_11:flow logs are a choice of the caller, see flow_logs
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = merge(var.tags, { Name = var.name })
}

# Whoever forgets to name a security group gets one that lets nothing through.
resource "aws_default_security_group" "this" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-unused" })
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = var.name })
}

resource "aws_subnet" "public" {
  #checkov:skip=CKV_AWS_130:only the NAT gateway, and machines of runs without one, are here; security groups admit nobody
  for_each = local.zones

  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.cidr, 4, each.value)
  map_public_ip_on_launch = !var.nat_gateway
  tags                    = merge(var.tags, { Name = "${var.name}-public-${each.key}" })
}

resource "aws_subnet" "private" {
  for_each = var.nat_gateway ? local.zones : {}

  vpc_id            = aws_vpc.this.id
  availability_zone = each.key
  cidr_block        = cidrsubnet(var.cidr, 4, 8 + each.value)
  tags              = merge(var.tags, { Name = "${var.name}-private-${each.key}" })
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-public" })
}

resource "aws_route" "public" {
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "public" {
  for_each = aws_subnet.public

  subnet_id      = each.value.id
  route_table_id = aws_route_table.public.id
}

resource "aws_eip" "nat" {
  #checkov:skip=CKV2_AWS_19:it belongs to the NAT gateway
  count = var.nat_gateway ? 1 : 0

  domain = "vpc"
  tags   = merge(var.tags, { Name = "${var.name}-nat" })
}

resource "aws_nat_gateway" "this" {
  count = var.nat_gateway ? 1 : 0

  allocation_id = aws_eip.nat[0].id
  subnet_id     = aws_subnet.public[var.availability_zones[0]].id
  tags          = merge(var.tags, { Name = var.name })

  depends_on = [aws_internet_gateway.this]
}

resource "aws_route_table" "private" {
  count = var.nat_gateway ? 1 : 0

  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-private" })
}

resource "aws_route" "private" {
  count = var.nat_gateway ? 1 : 0

  route_table_id         = aws_route_table.private[0].id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[0].id
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private[0].id
}

# Checkpoints and TensorBoard events do not pay the NAT gateway's price per gigabyte.
resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = concat([aws_route_table.public.id], aws_route_table.private[*].id)
  tags              = merge(var.tags, { Name = "${var.name}-s3" })
}

# Machines register themselves here at boot, so that one that replaces another is found under the same name.
resource "aws_route53_zone" "this" {
  #checkov:skip=CKV2_AWS_38:DNSSEC is for public zones
  #checkov:skip=CKV2_AWS_39:query logs are for public zones
  name          = var.domain
  comment       = "Names of the machines of ${var.name}"
  force_destroy = true # the records were made by machines
  tags          = var.tags

  vpc {
    vpc_id = aws_vpc.this.id
  }
}

resource "aws_flow_log" "this" {
  count = var.flow_logs == null ? 0 : 1

  vpc_id          = aws_vpc.this.id
  traffic_type    = "REJECT"
  log_destination = var.flow_logs.log_group_arn
  iam_role_arn    = var.flow_logs.role_arn
  tags            = merge(var.tags, { Name = var.name })
}
