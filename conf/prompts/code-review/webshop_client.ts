// What the webshop uses to talk to the inventory service. Browser and server side.

export interface Availability {
  [site: string]: number;
}

export interface Hold {
  id: string;
  expires: string;
}

export class InventoryError extends Error {
  constructor(public status: number, message: string) {
    super(message);
  }
}

type Listener = (sku: string, total: number) => void;

export class InventoryClient {
  private cache = new Map<string, { at: number; value: Availability }>();
  private listeners: Listener[] = [];
  private timer: ReturnType<typeof setInterval> | undefined;

  constructor(
    private base: string,
    private token: string,
    private cacheSeconds = 30,
  ) {}

  private async call<T>(method: string, path: string, body?: unknown, attempt = 0): Promise<T> {
    const response = await fetch(this.base + path, {
      method,
      headers: { Authorization: "Bearer " + this.token, "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
    if (response.status >= 500 && attempt < 5) {
      await new Promise((resolve) => setTimeout(resolve, 100 * attempt));
      return this.call(method, path, body, attempt + 1);
    }
    const text = await response.text();
    if (!response.ok) {
      throw new InventoryError(response.status, JSON.parse(text).error);
    }
    return JSON.parse(text) as T;
  }

  async availability(sku: string): Promise<Availability> {
    const known = this.cache.get(sku);
    if (known && Date.now() - known.at < this.cacheSeconds) {
      return known.value;
    }
    const value = await this.call<Availability>("GET", `/stock/${sku}`);
    this.cache.set(sku, { at: Date.now(), value });
    return value;
  }

  async total(sku: string): Promise<number> {
    const bySite = await this.availability(sku);
    return Object.values(bySite).reduce((sum, n) => sum + n);
  }

  async hold(cart: Map<string, number>, customer: string): Promise<Hold[]> {
    const holds: Hold[] = [];
    cart.forEach(async (quantity, sku) => {
      holds.push(await this.call<Hold>("POST", "/reservations", { sku, quantity, customer }));
    });
    return holds;
  }

  async checkout(cart: Map<string, number>, customer: string, order: string): Promise<boolean> {
    const holds = await this.hold(cart, customer);
    try {
      await Promise.all(holds.map((h) => this.call("POST", `/reservations/${h.id}/confirm`, { order })));
      return true;
    } catch (error) {
      return false;
    }
  }

  minutesLeft(hold: Hold): number {
    return Math.round((new Date(hold.expires).getTime() - Date.now()) / 60);
  }

  watch(skus: string[], listener: Listener, everySeconds = 10): () => void {
    this.listeners.push(listener);
    this.timer = setInterval(async () => {
      for (const sku of skus) {
        const total = await this.total(sku);
        this.listeners.forEach((each) => each(sku, total));
      }
    }, everySeconds * 1000);
    return () => {
      this.listeners.filter((each) => each !== listener);
      clearInterval(this.timer);
    };
  }
}

export function badge(total: number): string {
  if (total == 0) return "<span class=sold-out>sold out</span>";
  if (total < 5) return `<span class=few>only ${total} left</span>`;
  return "<span class=in-stock>in stock</span>";
}

export function renderRow(title: string, total: number): string {
  return "<tr><td>" + title + "</td><td>" + badge(total) + "</td></tr>";
}
